"""Text into Megatron's data files, each document with its source; Megatron's writer is handed in."""
