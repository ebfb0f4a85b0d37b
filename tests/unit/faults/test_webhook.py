"""Messages to an address of the web."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.cli import resolve
from configs.errors import ConfigError
from configs.monitor import WebhookConfig
from configs.sft import SFTConfig
from trainer.heartbeat import Heartbeat, Phase
from trainer.monitors import check_monitors
from trainer.run import rank_heartbeat
from trainer.webhook import _shortened, told

NO_URL = "the environment variable HOOK holds no URL that begins with https:// or http://, without spaces or a login"


class Server(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()

    def take(self) -> dict[str, Any]:
        """The next message."""
        return self.messages.get(timeout=20)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.server.messages.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as made:
        monkeypatch.setenv("ONELOOP_WEBHOOK_URL", f"http://127.0.0.1:{made.server_port}/s3cr3t-path")
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def heartbeat(tmp_path: Path) -> Heartbeat:
    """Rank 0's, of attempt 2 of the run "one"."""
    path = rank_heartbeat(tmp_path / "one", 2, 0)
    path.parent.mkdir(parents=True)
    return Heartbeat(path)


def test_a_run_that_comes_to_its_end(server: Server, heartbeat: Heartbeat, tmp_path: Path) -> None:
    said: list[str] = []
    with told(WebhookConfig(step_seconds=0.01), tmp_path / "one", 2, said.append):
        first = server.take()
        heartbeat.beat(Phase.DATA, 12)
        step = server.take()
        heartbeat.beat(Phase.DONE)
    last = server.take()
    assert [message["event"] for message in (first, step, last)] == ["started", "step", "finished"]
    assert [message["step"] for message in (first, step, last)] == [0, 12, 12]
    assert {(message["run"], message["attempt"]) for message in (first, step, last)} == {("one", 2)}
    assert [message["text"] for message in (first, step, last)] == [
        "one (attempt 2): started",
        "one (attempt 2): at step 12",
        "one (attempt 2): finished at step 12",
    ]
    assert said == [] and server.messages.empty()


def test_stopped_and_failed(
    server: Server, heartbeat: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    config = WebhookConfig(step_seconds=None)
    heartbeat.beat(Phase.STOPPED, 7)
    with told(config, tmp_path / "one", 2, print):
        pass
    with pytest.raises(RuntimeError), told(config, tmp_path / "one", 2, print):
        raise RuntimeError("rank 1 died with hf_0123456789 in hand")
    _, stopped, _, failed = [server.take() for _ in range(4)]
    assert (stopped["event"], stopped["step"]) == ("stopped", 7)
    assert (failed["event"], failed["reason"]) == ("failed", "rank 1 died with *** in hand")
    assert failed["text"] == "one (attempt 2): failed at step 7: rank 1 died with *** in hand"


def test_an_address_that_refuses_is_said_once_without_the_address(
    server: Server, heartbeat: Heartbeat, tmp_path: Path
) -> None:
    server.status = 500
    said: list[str] = []
    with told(WebhookConfig(), tmp_path / "one", 2, said.append):
        pass
    assert said == ["the webhook got no message, the run goes on without: HTTP Error 500: Internal Server Error"]
    assert server.messages.qsize() == 2


def test_an_address_that_does_not_answer_holds_up_nothing_but_the_end(
    heartbeat: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    import trainer.webhook

    monkeypatch.setattr(trainer.webhook, "_SECONDS", 0.2)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("ONELOOP_WEBHOOK_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}/s3cr3t-path")
        start = time.monotonic()
        with told(WebhookConfig(), tmp_path / "one", 2, said.append):
            assert time.monotonic() - start < 0.15
        assert time.monotonic() - start < 2
    assert len(said) == 1 and "timed out" in said[0] and "s3cr3t" not in said[0]


def test_a_server_that_does_not_speak_http_is_said_once(
    heartbeat: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as mail:

        def answer() -> None:
            for _ in range(2):
                connection, _ = mail.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"220 mail, not s3cr3t-path\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("ONELOOP_WEBHOOK_URL", f"http://127.0.0.1:{mail.getsockname()[1]}/s3cr3t-path")
        with told(WebhookConfig(), tmp_path / "one", 2, said.append):
            pass
    assert said == ["the webhook got no message, the run goes on without: 220 mail, not ***"]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("", "the environment variable HOOK is not set: it holds the URL"),
        ("hunter2secret", NO_URL),
        ("file:///etc/passwd", NO_URL),
        ("https://host/s3cr3t path", NO_URL),
        ("https://user:s3cr3t@host/", NO_URL),
        ("https://host:s3cr3t/", NO_URL),
        ("https://[::1/", NO_URL),
        ("https://höst/", NO_URL),
    ],
)
def test_without_an_address_nothing_is_started(monkeypatch: pytest.MonkeyPatch, value: str, fault: str) -> None:
    monkeypatch.setenv("HOOK", value)
    values = {"data": {"type": "fake"}, "monitors": {"webhook": {"url_variable": "HOOK"}}}
    with pytest.raises(ConfigError) as caught:
        check_monitors(SFTConfig.model_validate(values), print)
    assert [(found.key, found.message) for found in caught.value.faults] == [("monitors.webhook.url_variable", fault)]


def test_the_url_in_place_of_its_variable_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["--data.type", "fake", "--monitors.webhook.url-variable", "https://h/s3cr3t"], SFTConfig, "sft")
    faults = [fault for fault in caught.value.faults if fault.key == "monitors.webhook.url_variable"]
    assert [fault.message for fault in faults] == [
        "is no name of an environment variable; the URL stands in the environment, and its name here"
    ]
    assert "s3cr3t" not in str(caught.value)


def test_a_long_reason_keeps_its_begin_and_end() -> None:
    text = _shortened("rank 1 failed" + "x" * 9000 + "ValueError: the end")
    assert len(text) == 2005 and text.startswith("rank 1 failed") and text.endswith("ValueError: the end")
    assert _shortened("short") == "short"


def test_the_default_says_nothing(tmp_path: Path) -> None:
    with told(None, tmp_path, 0, print):
        pass
