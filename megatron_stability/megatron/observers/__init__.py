"""What runs with a step and measures; one file a family of signals."""
