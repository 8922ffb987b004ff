"""The only room that imports Megatron."""
