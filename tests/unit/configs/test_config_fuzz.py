"""Random command lines and files: whatever comes in, a config, a ConfigError or the help comes out."""

import random
from pathlib import Path

import pytest

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
    "{" * 3000, "float64",
]  # fmt: skip
TOML_VALUES = ["1", "-1.5", "nan", "true", '"None"', '"fake"', '"tokens"', "[]", "[1]", "{}", "1979-05-27", "{a = 1}"]
JSON_FILES = [b'{"model": null}', b"{}", b"[]", b'{"data": {"type": []}}', b"\xff"]


def random_argument(rng: random.Random, files: list[str]) -> list[str]:
    key = rng.choice(KEYS)
    if rng.random() < 0.2:
        at = rng.randrange(len(key) + 1)
        key = key[:at] + rng.choice(WORDS) + key[at + rng.randrange(2) :]
    if rng.random() < 0.3:
        key = key.replace("_", "-")
    values = [rng.choice(VALUES) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    match rng.randrange(4):
        case 0:
            return ["@", rng.choice(files)]
        case 1:
            return [f"--{key}", "@", rng.choice(files)]
        case 2:
            return [f"--no-{key}"]
        case 3:
            return [rng.choice(WORDS)]
        case 4 | 5:
            return [f"--{key}={rng.choice(VALUES)}"]
    return [f"--{key}", *values]


def random_file(rng: random.Random) -> bytes:
    lines = []
    for _ in range(rng.randrange(6)):
        key = rng.choice(KEYS)
        value = rng.choice(
            ["1", "-1.5", "nan", "true", '"None"', '"fake"', '"tokens"', "[]", "[1]", "{}", "1979-05-27", "{a = 1}"]
        )
        lines.append(f"{key} = {value}")
    content = "\n".join(lines).encode()
    if rng.random() < 0.2 and content:
        at = rng.randrange(len(content))
        content = content[:at] + rng.randbytes(2) + content[at + 1 :]
    return content


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_a_config_error_escapes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    run = ["--data.type=fake", "--model.arch.model_type=llama", "--model.init", "--max-steps=9"]
    resolved = 0
    for _ in range(60):
        files = ["gone.toml", ".", "\udcff.toml", "a.toml", "b.json"]
        Path("a.toml").write_bytes(random_file(rng))
        Path("b.json").write_bytes(
            rng.choice(['{"model": null}', "{}", "[]", '{"data": {"type": []}}', "\xff"]).encode("latin-1")
        )
        argv = [text for _ in range(rng.randrange(4)) for text in random_argument(rng, files)]
        if rng.random() < 0.5:
            argv = [*argv, *run]
        try:
            config = resolve(argv).config
        except ConfigError as error:
            assert error.faults
            text = render_error(error)
            assert all(line.isprintable() and line for line in text.split("\n"))
            assert len(text.split("\n")) == len(error.faults)
        else:
            resolved += 1
            assert SFTConfig.model_validate_json(config.model_dump_json()) == config
    assert resolved > 0
