"""Secrets and terminal codes are taken out where text leaves the program."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.cli import render_error, resolve
from configs.errors import ConfigError
from configs.safe_text import has_login, one_line, printable, safe, star_secrets
from trainer.command import fail, say
from trainer.errors import RunError
from trainer.logs import RankLog, setup_logging
from trainer.worker import _record

KEY = "local-0123456789abcdef"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\x08"


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


@contextmanager
def rank_log(folder: Path) -> Iterator[RankLog]:
    with (folder / "log").open("w") as stream:
        yield RankLog(path=folder / "log", rank=0, stream=stream, console=sys.stderr)


@given(st.text(st.characters()))
def test_printable_is_printable(text: str) -> None:
    assert printable(text).replace("\n", "").replace("\t", "").isprintable()
    assert one_line(text).isprintable()
    printable(text).encode()
    assert not text.isprintable() or printable(text) == one_line(text) == text


def test_what_a_terminal_obeys_becomes_an_escape() -> None:
    assert printable(f"a\n\t{HOSTILE}é") == "a\n\t\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202egnp.exe\\r\\x08é"


@pytest.mark.parametrize(
    ("name", "starred"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("HUGGING_FACE_HUB_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("CI_JOB_AUTH_TOKEN", True),
        ("GITHUB_TOKEN", True),
        ("HOME", False),
        ("EOS_TOKEN", False),
        ("PAD_TOKEN", False),
        ("KEYBOARD", False),
    ],
)
def test_values_of_variables_named_like_secrets(name: str, starred: bool) -> None:
    text = star_secrets(f"Illegal header value b'Bearer {KEY}'", {name: f"{KEY}\n"})
    assert (KEY not in text) == starred


def test_short_values_are_no_secrets() -> None:
    assert star_secrets("step 1 of 10", {"HF_TOKEN": "1", "API_KEY": "", "X_TOKEN": "step"}) == "step 1 of 10"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://me:pw@host/a", "https://***@host/a"),
        ("see 'https://token@host' and s3://k:s@b/c", "see 'https://***@host' and s3://***@b/c"),
        ("https://host/a@b", "https://host/a@b"),
        ("me@host: a://b", "me@host: a://b"),
    ],
)
def test_logins_in_urls(text: str, clean: str) -> None:
    assert star_secrets(text, {}) == clean
    assert has_login(text) == (text != clean)


def test_a_config_with_a_login_is_refused_and_not_shown() -> None:
    """The config is kept in the run directory as it is, so a secret in it would be too."""
    argv = ["--data.type=tokens", "--data.paths", "https://me:password1@host/data", "--model.arch.model_type=llama"]
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    text = render_error(caught.value)
    assert '"https://***@host/data" holds a login' in text
    assert "password1" not in text and "password1" not in str(caught.value)


@pytest.mark.parametrize("flag", ["--monitors.wandb.api_key", "--max-steps", "--data.seq_len", "--model.arch"])
def test_faults_do_not_repeat_secrets(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(ConfigError) as caught:
        resolve(["--data.type=fake", flag, KEY])
    assert KEY not in render_error(caught.value)


def test_what_commands_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    say(f"{HOSTILE} {KEY}\nnext")
    assert fail(f"{HOSTILE} {KEY}\udc80", 3) == 3
    out, err = capsys.readouterr()
    assert out == f"{printable(HOSTILE)} ***\nnext\n"
    assert err == f"{printable(HOSTILE)} ***\\udc80\n"


def test_what_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root_logger: None
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with rank_log(tmp_path) as log:
        setup_logging(log, level="info")
        logging.getLogger("trainer.x").warning("%s is %s", HOSTILE, KEY)
        try:
            raise ValueError(f"{KEY} {HOSTILE}")
        except ValueError:
            logging.getLogger("other").exception("failed")
    for text in (capsys.readouterr().out, (tmp_path / "log").read_text()):
        assert f"{printable(HOSTILE)} is ***" in text
        assert f"ValueError: *** {printable(HOSTILE)}" in text
        assert KEY not in text and text.replace("\n", "").isprintable()


@pytest.mark.parametrize("error", [RunError(KEY), ConfigError.one("a", KEY), ValueError(KEY)])
def test_what_a_failed_worker_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setenv("MY_PASSWORD", KEY)
    with rank_log(tmp_path) as log:
        _record(error, log, tmp_path / "rank_0.error.json")
    written = (tmp_path / "rank_0.error.json").read_text()
    assert KEY not in written + (tmp_path / "log").read_text()
    assert "***" in json.loads(written)["text"]


def test_safe_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    assert safe(f"\x1b{KEY}") == "\\x1b***"
