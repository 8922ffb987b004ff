"""Detectors: a StepRecord in, a Verdict out; state that can be saved."""
