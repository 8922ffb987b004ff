"""Data files: made from text, judged, and told from others. No Megatron."""
