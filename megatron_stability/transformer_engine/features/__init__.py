"""Features that nvdlfw-inspect loads from this folder, as it loads Transformer Engine's own; nothing imports them."""
