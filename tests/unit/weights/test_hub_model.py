"""`model.name` as an id of the Hugging Face hub: a server in this process stands for it."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from configs.errors import ConfigError
from trainer.preflight import preflight, prepare
from trainer.weights.folder import open_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class Hub:
    """One repository, `owner/tiny`, and what was fetched from it."""

    folder: Path
    fetched: list[str] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        files = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        prefix = "/owner/tiny/resolve/"
        if path.startswith("/api/models/owner/tiny/revision/"):
            siblings = [{"rfilename": file} for file in files]
            self._send(request, json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif path == f"/api/models/owner/tiny/tree/{COMMIT}":
            sizes = {file: (self.folder / file).stat().st_size for file in files}
            tree = [{"type": "file", "path": file, "size": size, "oid": file} for file, size in sizes.items()]
            self._send(request, json.dumps(tree).encode(), {})
        elif path.startswith(prefix) and (name := path.removeprefix(prefix).partition("/")[2]) in files:
            content = (self.folder / name).read_bytes()
            if request.command == "GET":
                self.fetched.append(name)
            self._send(request, content, {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(request, b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    def _send(self, request: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        request.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_model) -> Iterator[Hub]:
    from huggingface_hub import constants

    save_model("qwen3", name="repository", max_shard_size="5KB")
    hub = Hub(folder=tmp_path / "repository")
    for name in ("evil.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_bytes(b"not to be fetched")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        def do_HEAD(self) -> None:
            hub.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def check(tmp_path: Path, run_config):
    """check(**tables): preflight of a run of the hub's model; gives what it said."""

    def run(*, model: dict | None = None, **tables) -> list[str]:
        said: list[str] = []
        config = run_config(model={"name": "owner/tiny"} | (model or {}), **tables)
        preflight(config, run_dir=tmp_path / "one", world_size=1, say=said.append)
        return said

    return run


def _weights(hub: Hub) -> list[str]:
    return [name for name in hub.fetched if name.endswith(".safetensors")]


def test_the_launcher_fetches_and_workers_use_the_cache(hub, check, run_config, run_losses, tmp_path):
    """Field case R120: only data is fetched, and only what a run of this kind reads."""
    shards = sorted(path.name for path in hub.folder.glob("model-*.safetensors"))
    assert check() == [f"model: fetching the weights of owner/tiny, {len(shards)} files"]
    assert sorted(_weights(hub)) == shards
    assert {Path(name).suffix for name in hub.fetched} == {".json", ".safetensors"}
    count = len(hub.fetched)
    assert check() == [] and len(hub.fetched) == count

    shutil.rmtree(hub.folder)
    losses = run_losses(run_config(model={"name": "owner/tiny"}))
    assert len(losses) == 3 and len(hub.fetched) == count
    folder = prepare(run_config(model={"name": "owner/tiny"})).model_folder
    assert folder == tmp_path / "cache" / "models--owner--tiny" / "snapshots" / COMMIT
    assert all(stored.file.is_symlink() for stored in open_weights(folder).tensors.values())


@pytest.mark.parametrize("model", [{"init": {}}, {"debug": {"random_init": True}}])
def test_weights_that_are_not_needed_are_not_fetched(model, hub, check):
    check(model=model)
    assert "config.json" in hub.fetched and _weights(hub) == []


def test_an_architecture_we_lack_is_refused_before_its_weights_are_fetched(hub, check):
    path = hub.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=r"^model.name: hidden_act: "):
        check()
    assert "config.json" in hub.fetched and _weights(hub) == []


def test_a_repository_that_does_not_exist(hub, check):
    with pytest.raises(ConfigError) as error:
        check(model={"name": "owner/gone"})
    assert str(error.value).startswith("model.name: 'owner/gone' is no folder here, and the Hugging Face hub does not")


def test_a_worker_without_the_launchers_cache_says_so(hub, run_config):
    with pytest.raises(ConfigError) as error:
        prepare(run_config(model={"name": "owner/tiny"}))
    assert str(error.value).startswith("model.name: 'owner/tiny' is no folder here, and the cache of the Hugging Face")
    assert hub.fetched == []


def test_offline_the_cache_is_enough_if_it_is_whole(hub, check, monkeypatch):
    from huggingface_hub import constants

    check(model={"init": {}})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check(model={"init": {}})
    with pytest.raises(ConfigError) as error:
        check()
    assert str(error.value).startswith("model.name: 'owner/tiny' is no folder here, and the Hugging Face hub does not")


def test_a_shard_that_the_hub_lacks(hub, check):
    (name,) = [path.name for path in hub.folder.glob("model-00002-of-*")]
    (hub.folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} is missing, and model.safetensors.index.json names it"):
        check()


def test_a_repository_of_pickles_only(hub, check):
    for path in hub.folder.glob("model*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        check()
    assert "pytorch_model.bin" not in hub.fetched
