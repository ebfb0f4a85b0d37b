"""A wandb server of the tests."""

import gzip
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Server(ThreadingHTTPServer):
    """As much of a wandb server as runs need."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[int] = []
        """Steps as wandb counts them, in the order they came."""

        self.history: list[tuple[str, dict[str, Any]]] = []
        """Rows, and which run they are of."""

        self.upserts: list[dict[str, Any]] = []
        """What runs said of themselves."""

        self.ends: list[str] = []
        """Runs that were said to have ended."""

        self.shared: set[str] = set()
        """Runs whose rows came in the way of wandb's mode "shared"."""

        self.gone = False
        """Every connection is cut."""

    def answer(self, path: str, body: bytes, is_shared: bool) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            run_id, sent = path.split("/")[-2], json.loads(body)
            rows = [
                json.loads(line) for line in sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            ]
            self.rows += [row["_step"] for row in rows]
            self.history += [(run_id, {name: row[name] for name in row if name[0] != "_"}) for row in rows]
            self.ends += [run_id] if sent.get("complete") else []
            self.shared |= {run_id} if is_shared else set()
            return {}
        if not path.endswith("/graphql"):
            return {}
        request = json.loads(body)
        query, data = request["query"], {}
        if "viewer" in query:
            data["viewer"] = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        if "RunResumeStatus" in query:
            self.known(data, request["variables"]["name"])
        if "upsertBucket" in query:
            self.upserts.append(request["variables"])
            project = {"id": "p", "name": "tests", "entity": {"id": "e", "name": "me"}}
            name = request["variables"].get("name") or "new"
            bucket = {"id": "b", "name": name, "displayName": name, "config": "{}", "project": project}
            data["upsertBucket"] = {"bucket": bucket, "inserted": True}
        if "createRunFiles" in query:
            data["createRunFiles"] = {"runID": "b", "uploadHeaders": [], "files": []}
        return {"data": data}

    def known(self, data: dict[str, Any], name: str) -> None:
        """A run that was there before."""
        if any(upsert["name"] == name for upsert in self.upserts):
            bucket = {"id": "b", "name": name, "displayName": name, "summaryMetrics": "{}", "config": "{}"}
            lines = {"logLineCount": 0, "historyLineCount": 0, "eventsLineCount": 0, "historyTail": "[]"}
            rest = {"eventsTail": "[]", "tags": [], "notes": None, "wandbConfig": '{"t": 1}'}
            data["model"] = {"id": "p", "name": "tests", "entity": {"id": "e", "name": "me"}}
            data["model"]["bucket"] = bucket | lines | rest


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.gone:
            self.close_connection = True
            return
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = json.dumps(
            self.server.answer(self.path, body, self.headers.get("X-WANDB-USE-ASYNC-FILESTREAM") == "true")
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def own_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A key, and no settings or logins of whoever runs the tests."""
    caplog.set_level(logging.INFO, "trainer")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    import wandb

    yield
    wandb.teardown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as made:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{made.server_port}")
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()
