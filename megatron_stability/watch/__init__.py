"""A run seen from outside of it: a process of its own, in no collective, that tells people."""
