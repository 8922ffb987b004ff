"""What is known of FP8 tensors: every step, and sampled."""
