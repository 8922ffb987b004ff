"""Pure torch: QK-norm, softcaps, z-loss, QK-clip, initialisation, embedding norms, FP8 formats."""
