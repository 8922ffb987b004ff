"""What a step is made of: local signals, packed into one vector a rank, reduced by one collective."""
