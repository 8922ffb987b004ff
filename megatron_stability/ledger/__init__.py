"""What is written down of a run: a line a step, incident bundles, gradient sketches; and what became of a sample."""
