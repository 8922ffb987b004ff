"""What the adapter itself needs of a Megatron tree."""
