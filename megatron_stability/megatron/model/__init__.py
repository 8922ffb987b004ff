"""Prevention inside Megatron's model: norms, attention, loss, initialisation, embedding clip."""
