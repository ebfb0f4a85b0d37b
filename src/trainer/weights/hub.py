"""From `model.name` to a folder: one that is here, or a snapshot of the Hugging Face hub in its cache.

The launcher downloads; workers only look into the cache, so that ranks neither race nor see different revisions.
"""

from collections.abc import Callable
from pathlib import Path

from configs.errors import ConfigError
from configs.model import is_hub_id
from models.errors import one_line

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Config, index and tokenizer. Never code, and no weights."""


def find_model(name: str, *, download: bool) -> Path:
    """The folder of `model.name`: its config and tokenizer are there, its weights need not be yet.

    Args:
        name: a folder, or an id on the hub.
        download: ask the hub for what is missing or newer; otherwise its cache must have the files.

    Raises:
        ConfigError: there is no such folder, and the hub or its cache does not give one.
    """
    try:
        if Path(name).is_dir():
            return Path(name)
    except (OSError, ValueError) as error:
        raise ConfigError.one("model.name", f"{name} cannot be read: {error}") from error
    if not is_hub_id(name):
        raise ConfigError.one("model.name", f"there is no folder {name}")
    return _snapshot(name, _SMALL_FILES, revision=None, download=download)


def fetch_weights(name: str, folder: Path, files: list[str], say: Callable[[str], None]) -> None:
    """Have the hub's cache hold the named files of its snapshot; nothing to do where `model.name` is a folder.

    Args:
        name: `model.name`.
        folder: what `find_model` gave for it.
        files: names in the folder.
        say: told that this may take a while.

    Raises:
        ConfigError: the hub does not give them.
    """
    if folder != Path(name) and any(not (folder / file).exists() for file in files):
        say(f"model: fetching the weights of {name}, {len(files)} file{'s' * (len(files) > 1)}")
        # With a file that is there, or the library stumbles over patterns that match nothing.
        _snapshot(name, ["config.json", *files], revision=folder.name, download=True)


def _snapshot(name: str, patterns: list[str], *, revision: str | None, download: bool) -> Path:
    # Imports httpx and more, which takes a while; a local folder needs none of it.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=not download, library_name="oneloop"
        )
    except Exception as error:  # the library raises its own errors, httpx's, OSError and ValueError
        where = "the Hugging Face hub" if download else "the cache of the Hugging Face hub on this machine"
        raise ConfigError.one(
            "model.name", f"{name!r} is no folder here, and {where} does not give it: {one_line(error)}"
        ) from error
    return Path(folder)
