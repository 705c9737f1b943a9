"""Notifications: a command or a web address of this party's own that learns when somebody has to look.

    notify = ["/usr/local/bin/tell-privacy-office", "--queue", "studies"]     in local/site.toml: JSON on standard input
    notify = "https://chat.example.org/hooks/cloister"                        JSON in a POST

    {"event": "waiting", "party": "basel", "study": "three-hospitals", "digest": "2ebf…", "text": "…"}

Events: `waiting` (a study in the kit has no decision yet; once for each study file), `failed` (a run ended without a
result), `twice` (at the coordinator: a party connects twice). Nothing of the cells is in them. A hook that fails leaves
a line in the log and changes nothing else. The service calls it, so its unit has to allow the connection.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from cloister.errors import ParameterError

SECONDS = 30.0  # for one notification
WAITING = 100  # notifications that wait; more are dropped

log = logging.getLogger("cloister.deploy")


def read_hook(raw: Any, where: str) -> str | tuple[str, ...]:
    """The line of site.toml: a web address, a command as a list, or "" for none."""
    if raw == "":
        return ""
    if isinstance(raw, str):
        parts = urlsplit(raw)
        if parts.scheme in ("http", "https") and parts.hostname:
            return raw
    elif isinstance(raw, list) and raw and all(isinstance(x, str) for x in raw) and raw[0].startswith("/"):
        return tuple(raw)
    raise ParameterError(
        f"{where}: 'notify' must be a web address in quotes, or a command as a list that begins with a full path"
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def send(hook: str | tuple[str, ...], event: Mapping[str, str]) -> str:
    """Send one notification; returns why it failed, or "". No address is repeated: its path may be a secret."""
    data = json.dumps(dict(event)).encode()
    try:
        if isinstance(hook, tuple):
            done = subprocess.run([*hook], input=data, capture_output=True, timeout=SECONDS, check=False)
            return f"{hook[0]} ended with {done.returncode}" if done.returncode else ""
        request = urllib.request.Request(hook, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=SECONDS) as answer:
            answer.read(1 << 12)
        return ""
    except subprocess.TimeoutExpired:
        return f"{hook[0]} did not end within {SECONDS:g} s"
    except urllib.error.HTTPError as e:
        return f"{urlsplit(str(hook)).hostname} answered {e.code}"
    except (OSError, ValueError, HTTPException) as e:
        name = hook[0] if isinstance(hook, tuple) else urlsplit(hook).hostname
        return f"{name}: {getattr(e, 'strerror', None) or getattr(e, 'reason', None) or type(e).__name__}"


class Notifier:
    """Sends notifications in the background, one after the other."""

    def __init__(self) -> None:
        self._queue = queue.Queue[tuple[str | tuple[str, ...], dict[str, str]]](WAITING)
        self._thread: threading.Thread | None = None

    def post(self, hook: str | tuple[str, ...], event: dict[str, str]) -> None:
        if not hook:
            return
        try:
            self._queue.put_nowait((hook, event))
        except queue.Full:
            log.warning("a notification was dropped: %d others wait", WAITING)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            hook, event = self._queue.get()
            if why := send(hook, event):
                log.warning("the notification '%s' failed: %s", event.get("event"), why)
