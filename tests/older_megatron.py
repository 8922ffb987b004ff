"""Where the second supported release of megatron-core lies."""

import os
import sys
from pathlib import Path


def older_release() -> str:
    """The folder where `ci/env.sh` puts megatron-core 0.18.2 beside the environment's own release."""
    named = os.environ.get("MEGATRON_CORE_0_18_2")
    folder = Path(named) if named else Path(sys.prefix) / "megatron-core-0.18.2"
    if not (folder / "megatron" / "core").is_dir():
        raise FileNotFoundError(f"{folder} does not hold megatron-core 0.18.2; run `bash ci/env.sh`")
    return str(folder)
