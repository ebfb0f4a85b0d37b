"""Random command lines and files: whatever comes in, a config, a ConfigError or the help comes out."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.cli import render_error, resolve
from configs.errors import ConfigError
from configs.schema import all_keys, dotted
from configs.sft import SFTConfig

KEYS = [dotted(key) for key in all_keys(SFTConfig)]
WORDS = ["x", "type", "0", "-", "--", "no-", "\x00", "\udcff", "é", "", " ", ".", "a.b", "[", "{", "=", "@", "🙂", "\n"]
VALUES = [
    "1", "-1", "0.5", "1e400", "-1e-3", "nan", "true", "false", "None", "null", "fake", "tokens", "linear", "cosine",
    "[]", "[1, 2]", "{}", '{"type": "fake"}', '{"type": {}}', '{"a": [{"b": null}]}', '{"name": "a", "path": 3}',
    "[[[[", "9" * 30, "9" * 6000, "\x00", "", "é", "\ud800", "'a'", '"a"', "-", "--", "@", "a b", "1\n2", "/", "..",
    "{" * 3000, "float64", "\x1b[2J", "\u202e", "1_000", "1__0", "+1", "0x10", "-inf",
]  # fmt: skip
RUN = ["--data.type=fake", "--model.arch.model_type=llama", "--model.init", "--max-steps=9"]
FILES = ["gone.toml", ".", "\udcff.toml", "a.toml", "b.json", "loop.toml", "/dev/null", "n\x00l.toml", ""]

texts = st.text(st.characters(), max_size=12)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-9, 4096), st.floats(), texts, st.sampled_from(VALUES[:22])
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
tables = st.dictionaries(st.sampled_from(KEYS) | texts, trees, max_size=6)


def outcome(argv: Sequence[str]) -> SFTConfig | ConfigError:
    """What a command line gives, checked for what must hold of either."""
    try:
        config = resolve(argv).config
    except ConfigError as error:
        assert error.faults
        lines = render_error(error).split("\n")
        assert all(line and line.isprintable() for line in lines)
        assert len(lines) == len(error.faults) or len(lines) == 101
        return error
    assert SFTConfig.model_validate_json(config.model_dump_json()) == config
    return config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("loop.toml").symlink_to("loop.toml")
    Path("a.toml").write_text('data.type = "fake"')
    Path("b.json").write_text('{"model": null}')
    return tmp_path


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`; where a key goes through another one's value, the later wins."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *above, name = key.split(".")
        table = root
        for part in above:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[name] = value
    return root


def as_toml(value: Any) -> str:
    """The value in TOML's own spelling; a JSON string is a TOML string."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if value is None:
        return '"None"'
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(st.binary(max_size=300), st.sampled_from(["a.toml", "b.json", "c"]))
def test_random_bytes(folder: Path, content: bytes, name: str) -> None:
    Path(name).write_bytes(content)
    outcome(["@", name])


@given(tables, st.booleans())
def test_trees_over_the_schemas_keys(folder: Path, flat: dict[str, Any], run: bool) -> None:
    """Any value at any key: the same config, or the same faults, from TOML and from JSON."""
    values = nested(flat)
    Path("b.json").write_text(json.dumps(values))
    toml = "\n".join(f"{quoted(key)} = {as_toml(value)}" for key, value in values.items())
    Path("a.toml").write_bytes(toml.encode(errors="surrogatepass"))
    results = [outcome(["@", name, *(RUN if run else [])]) for name in ("a.toml", "b.json")]
    if not all(isinstance(result, ConfigError) for result in results):
        assert results[0] == results[1]


@given(st.data())
def test_damaged_files(folder: Path, data: st.DataObject) -> None:
    """A sound file with some bytes replaced, left out or put in."""
    lines = ['model.arch.model_type = "llama"', "model.init = {}", "max_steps = 3", "[data]", 'type = "fake"']
    content = bytearray("\n".join([*lines, "seq_len = 16", "batch_size = 4"]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    Path("a.toml").write_bytes(content)
    outcome(["@", "a.toml"])


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    key = draw(st.sampled_from(KEYS))
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(key)))
        key = key[:at] + draw(st.sampled_from(WORDS)) + key[at + draw(st.integers(0, 1)) :]
    if draw(st.booleans()):
        key = key.replace("_", "-")
    value = draw(st.sampled_from(VALUES) | texts)
    file = draw(st.sampled_from(FILES))
    forms = [["@", file], [f"@{file}"], [f"--{key}", "@", file], [f"--no-{key}"], [draw(st.sampled_from(WORDS))]]
    forms += [[f"--{key}={value}"], [f"--{key}", value], [f"--{key}", value, draw(st.sampled_from(VALUES))]]
    return draw(st.sampled_from(forms))


@given(st.lists(arguments(), max_size=4), st.booleans())
def test_command_lines(folder: Path, parts: list[list[str]], run: bool) -> None:
    outcome([text for part in parts for text in part] + (RUN if run else []))


def test_a_sound_command_line_is_among_them(folder: Path) -> None:
    """The outcomes above could all be errors."""
    assert isinstance(outcome(["@", "a.toml", *RUN[1:]]), SFTConfig)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["@", "loop.toml"], "Too many levels of symbolic links"),
        (["@", "."], "is a folder"),
        (["@", "n\x00l.toml"], "cannot be read"),
        (["@", "/dev/zero"], "larger than 4 MiB"),
        (["@", "/dev/null"], "data: is missing"),
    ],
)
def test_what_is_no_file(folder: Path, argv: list[str], words: str) -> None:
    result = outcome(argv)
    assert isinstance(result, ConfigError) and words in render_error(result)


def test_a_pipe_is_read_as_a_file(folder: Path) -> None:
    """`sft @ <(...)`: what a shell hands over is no regular file."""
    out, into = os.pipe()
    os.write(into, b'[data]\ntype = "fake"')
    os.close(into)
    assert isinstance(outcome(["@", f"/dev/fd/{out}", *RUN[1:]]), SFTConfig)
    os.close(out)


@pytest.mark.parametrize(
    "content",
    [
        "a." * 50_000 + "a = 1",
        "\n".join(f"key{i} = 1" for i in range(5000)),
        "\n".join(f"[t{i}]\na = 1" for i in range(5000)),
        "[data]\n" + "\n".join(f"key{i} = 1" for i in range(1500)),
        "a = " + "[" * 50_000,
        f"{'k' * 100_000} = 1",
        f"data.type = '{'x' * 1_000_000}'",
        "data = {type = 'tokens', paths = [" + "'x'," * 30_000 + "]}",
    ],
    ids=["dots", "keys", "tables", "unknown keys", "brackets", "long key", "long value", "long list"],
)
def test_large_files_are_answered_at_once(folder: Path, content: str) -> None:
    """Each was minutes of looking for the nearest names, or a terminal full of lines."""
    Path("a.toml").write_text(content)
    result = outcome(["@", "a.toml"])
    assert isinstance(result, ConfigError)
    lines = render_error(result).split("\n")
    assert len(lines) <= 101 and max(map(len, lines)) < 4200


def test_a_byte_order_mark_is_no_content(folder: Path) -> None:
    Path("a.toml").write_bytes(b"\xef\xbb\xbf" + b'data.type = "fake"')
    assert isinstance(outcome(["@", "a.toml", *RUN[1:]]), SFTConfig)
