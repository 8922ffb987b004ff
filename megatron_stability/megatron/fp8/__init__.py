"""Emulated FP8 in place of linears of the local spec."""
