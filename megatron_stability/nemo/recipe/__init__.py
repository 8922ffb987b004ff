"""NeMo YAML recipes: read, checked, merged."""
