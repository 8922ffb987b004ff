"""Seams by anchor: found on the syntax tree, spliced into the text."""
