"""The one kind of error that a user is meant to read."""

from megatron_stability.echo import said

EXIT_FINE, EXIT_FINDING, EXIT_UNUSABLE = 0, 1, 2
EXIT_HALTED = 18  # the policy stopped the run; 16 and 17 are taken by the rerun state machine of Megatron
EXIT_REWIND = 19  # the policy wants the run started again, from an older checkpoint (`checkpoints/run_state.py`)


class UsageError(Exception):
    """Bad input: one clear sentence that names the flag, file, rank or layer and says how to mend it; exit code 2.

    The command line prints `str(error)` alone, without a traceback. Programming errors are never wrapped in it. What
    the sentence repeats of files and arguments is cut short, and shown without control characters and secrets.
    """

    exit_code = EXIT_UNUSABLE

    def __init__(self, sentence: str) -> None:
        """Takes the sentence."""
        super().__init__(said(sentence))


class HaltedError(UsageError):
    """A start that would only repeat a halt; exit code 18."""

    exit_code = EXIT_HALTED
