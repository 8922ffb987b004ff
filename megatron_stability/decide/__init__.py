"""Verdicts in, one Decision out."""
