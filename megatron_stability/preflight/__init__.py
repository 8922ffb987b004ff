"""What is known to go wrong, looked for in a training command before it starts: a table of checks over its settings."""
