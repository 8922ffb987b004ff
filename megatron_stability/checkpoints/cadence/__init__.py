"""How often to save, from measured costs."""
