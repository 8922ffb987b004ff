"""The only room that imports Megatron-Bridge."""
