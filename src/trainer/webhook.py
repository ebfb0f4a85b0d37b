"""Tells an HTTP address what becomes of a run: started, its step now and then, stopped, finished, failed.

From the launcher, which sees a run end however it ends, and in a thread of its own: an address that does not answer
costs a run nothing but a few seconds at its very end, and never fails it.
"""

import json
import os
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.errors import ConfigError
from configs.monitor import WebhookConfig
from configs.safe_text import safe
from trainer.heartbeat import Phase, read_beat
from trainer.run import rank_heartbeat
from trainer.text import first_line

_SECONDS = 5.0
"""For an answer; and what the last message gets before the launcher ends without it."""

_REASON_CHARACTERS = 2000


def webhook_url(config: WebhookConfig) -> str:
    """The address, from the environment.

    Raises:
        ConfigError: there is none, or it is no address of the web.
    """
    url = os.environ.get(config.url_variable, "").strip()
    if not url:
        message = f"the environment variable {config.url_variable} is not set: it holds the URL"
        raise ConfigError.one("monitors.webhook.url_variable", message)
    if not _is_address(url):
        # Not the value: it may be a secret that was put into the wrong variable.
        message = (
            f"the environment variable {config.url_variable} holds no URL that begins with https:// or http://, "
            "without spaces or a login"
        )
        raise ConfigError.one("monitors.webhook.url_variable", message)
    return url


def _is_address(url: str) -> bool:
    """Whether requests can be sent to it: what http.client refuses, it repeats in its message."""
    try:
        parts = urlsplit(url)
        is_sound = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_sound and is_plain


@contextmanager
def told(config: WebhookConfig | None, run_dir: Path, attempt: int, say: Callable[[str], None]) -> Iterator[None]:
    """Tell what becomes of an attempt that runs within; with None, nothing. Arguments as of `Webhook`."""
    if config is None:
        yield
        return
    webhook = Webhook(config, run_dir, attempt, say)
    webhook.start()
    try:
        yield
    except BaseException as error:
        webhook.end(str(error) or type(error).__name__)
        raise
    webhook.end()


class Webhook:
    """The messages of one attempt."""

    def __init__(self, config: WebhookConfig, run_dir: Path, attempt: int, say: Callable[[str], None]) -> None:
        """
        Args:
            say: told once when a message cannot be sent.

        Raises:
            ConfigError: see `webhook_url`.
        """
        self._url = webhook_url(config)
        self._step_seconds = config.step_seconds
        self._run_dir, self._attempt = run_dir, attempt
        self._say = say
        self._failed = False
        self._events: queue.Queue[tuple[str, str]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        """Say that the attempt begins."""
        self._events.put(("started", ""))
        self._thread.start()

    def end(self, failure: str | None = None) -> None:
        """Say how it ended, by the failure or by what rank 0 said last, and wait a few seconds for that to be sent."""
        if failure is not None:
            self._events.put(("failed", _shortened(safe(failure))))
        else:
            beat = read_beat(rank_heartbeat(self._run_dir, self._attempt, 0))
            self._events.put(("finished" if beat is not None and beat.phase is Phase.DONE else "stopped", ""))
        self._thread.join(2 * _SECONDS)

    def _run(self) -> None:
        told, due = 0, self._next_step_time()
        while True:
            try:
                event, reason = self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = self._next_step_time()
                step = self._step
                if step != told:
                    told = step
                    self._send("step", "", step)
                continue
            self._send(event, reason, self._step)
            if event != "started":
                return

    def _next_step_time(self) -> float | None:
        return None if self._step_seconds is None else time.monotonic() + self._step_seconds

    @property
    def _step(self) -> int:
        beat = read_beat(rank_heartbeat(self._run_dir, self._attempt, 0))
        return 0 if beat is None else beat.step

    def _send(self, event: str, reason: str, step: int) -> None:
        what = f"at step {step}" if event == "step" else f"{event} at step {step}" if step else event
        message: dict[str, Any] = {
            "event": event,
            "run": self._run_dir.name,
            "attempt": self._attempt,
            "step": step,
            "host": socket.gethostname(),
            "time": time.time(),
            # What chat services show of a message.
            "text": f"{self._run_dir.name} (attempt {self._attempt}): {what}" + (f": {reason}" if reason else ""),
        }
        if reason:
            message["reason"] = reason
        request = urllib.request.Request(
            self._url, data=json.dumps(message).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS):
                pass
        except (OSError, ValueError, HTTPException) as error:  # of connections, answers, and what is no HTTP
            if not self._failed:
                self._failed = True
                why = first_line(error)
                for secret in (self._url, urlsplit(self._url).path.strip("/")):
                    why = why.replace(secret, "***") if secret else why
                self._say(f"the webhook got no message, the run goes on without: {why}")


def _shortened(text: str) -> str:
    """Its begin, which names the rank, and its end, which has the error of a traceback."""
    half = _REASON_CHARACTERS // 2
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"
