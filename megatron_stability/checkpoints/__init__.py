"""Checkpoints, proven: manifest and marker, the choice of a generation, comparison, drill, and how often to save."""
