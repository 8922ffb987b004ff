"""From an incident to its cause: what speaks for and against each hypothesis, and the experiment that would decide."""
