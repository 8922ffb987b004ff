"""Messages out: to people through apprise, and a ping to what notices when the watcher itself falls silent."""

from __future__ import annotations

import http.client
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_stability.echo import masked_text
from megatron_stability.errors import UsageError

TIMEOUT = 10.0  # seconds of one ping
PING_SECONDS = 60.0  # between two pings


class Notifier:
    """Sends a message to every service that was named.

    Args:
        urls: of services, as apprise writes them (`mailto://…`, `slack://…`, `pagerduty://…`, `json://…`).
        config: a file of such URLs in apprise's own form (text or YAML): what is in it is in no process list.

    Raises:
        UsageError: apprise takes a URL for none, or the file names no service.
    """

    def __init__(self, urls: Sequence[str], config: Path | None) -> None:
        import apprise

        self._services = apprise.Apprise()
        for url in urls:
            if not self._services.add(url):
                scheme = url.partition(":")[0]
                raise UsageError(
                    f"--notify: apprise knows no service `{scheme}://…` of this form; see its list of URLs"
                )
        if config is not None:
            if not config.is_file():
                raise UsageError(f"--notify-file: {config} is no file")
            read = apprise.AppriseConfig()
            read.add(str(config))
            if not read.servers():
                raise UsageError(f"--notify-file: {config} names no service; one apprise URL a line")
            self._services.add(read)

    def send(self, title: str, body: str) -> bool:
        """Deliver one message.

        Args:
            title: short.
            body: plain text; nothing in it is taken for markup.

        Returns:
            Whether every service took it.
        """
        import apprise

        title, body = masked_text(title), masked_text(body)
        delivered = bool(self._services.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT))
        if not delivered:
            print(
                f"megatron-stability watch: a message was not delivered and will be sent again: {title}",
                file=sys.stderr,
            )
        return delivered


def on_stderr(title: str, body: str) -> bool:
    """Where no service is named: the message on standard error, for the journal of the scheduler."""
    print(body, file=sys.stderr, flush=True)
    return True


class DeadMan:
    """Pings a URL while the watcher works; the service behind it alerts when the pings stop.

    A ping goes out only after a look has come to its end, from a thread of its own, so that a slow service delays no
    look, and a look that hangs on a file system stops the pings.

    Args:
        url: http or https.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise UsageError("--dead-man: is no http(s) URL; name the ping URL of a service such as healthchecks.io")
        self._url = url
        self._last: float | None = None
        self._thread: threading.Thread | None = None
        self.failed = False

    def alive(self, now: float) -> None:
        """Ping, if the last one was long enough ago and none is under way.

        Args:
            now: seconds on a clock that does not go back.
        """
        busy = self._thread is not None and self._thread.is_alive()
        if busy or (self._last is not None and now - self._last < PING_SECONDS):
            return
        self._last = now
        self._thread = threading.Thread(target=self._ping, name="stability-dead-man", daemon=True)
        self._thread.start()

    def _ping(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=TIMEOUT):
                self.failed = False
        except (OSError, urllib.error.URLError, http.client.HTTPException) as error:
            if not self.failed:  # once; the service notices by itself
                print(f"megatron-stability watch: the dead man's switch was not reached: {error}", file=sys.stderr)
            self.failed = True
