"""Which checkpoint a run resumes from, and whether it is this run's."""
