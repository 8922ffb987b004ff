"""Attention as Megatron computes it: which rows belong to which head, largest logits, QK-clip."""
