"""Keeps Megatron-LM and NeMo pretraining stable and its failures explainable.

Importing this package pulls in neither torch nor megatron; start reading at `pipeline.py`.
"""

__version__ = "0.1.0"
