"""The only room that imports Transformer Engine or nvdlfw-inspect."""
