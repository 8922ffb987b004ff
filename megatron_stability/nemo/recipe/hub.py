"""Whether a model hub can be reached, asked once and in seconds: its client retries for two minutes."""

from __future__ import annotations

import os
import socket
from typing import Final
from urllib.parse import urlsplit

WAIT_S: Final = 3.0
OFFLINE: Final = "HF_HUB_OFFLINE"


def offline_if_unreachable() -> str | None:
    """Turn the hub's client to what is on this machine where the hub doesn't answer; before the client is imported.

    Returns:
        Why, or None where the hub answers or is switched off already.
    """
    if os.environ.get(OFFLINE):
        return None
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    proxy = next((os.environ[name] for name in ("HTTPS_PROXY", "https_proxy") if os.environ.get(name)), None)
    where = urlsplit(proxy if proxy and "://" in proxy else f"http://{proxy}" if proxy else hub)
    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.hostname or hub, port), WAIT_S).close()
    except OSError as error:
        os.environ[OFFLINE] = "1"
        return f"{where.hostname} can't be reached ({error.strerror or error})"
    return None
