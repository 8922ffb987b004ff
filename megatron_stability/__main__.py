"""`python -m megatron_stability`: the command, for launchers that start modules."""

import sys

from megatron_stability.cli import main

if __name__ == "__main__":
    sys.exit(main())
