"""Saves and loads around Megatron's own: manifest after, choice before, rewind within."""
