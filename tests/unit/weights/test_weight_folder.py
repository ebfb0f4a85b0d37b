"""What a folder of weights may hold: refusals from headers alone, damage of every kind, nothing run or followed."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from configs.errors import ConfigError
from trainer.errors import RunError
from trainer.preflight import preflight
from trainer.weights.folder import open_weights, weight_file_names
from trainer.weights.load import load_weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path, save_model) -> Path:
    """A sound model in one file."""
    save_model()
    return tmp_path / "hf"


@pytest.fixture
def shards(tmp_path, save_model) -> Path:
    """A sound model in several files."""
    save_model(max_shard_size="5KB")
    return tmp_path / "hf"


@pytest.fixture
def fault(tmp_path, run_config):
    """fault(**tables): the one fault that preflight finds."""

    def find(**tables: Any) -> str:
        with pytest.raises(ConfigError) as error:
            preflight(run_config(**tables), run_dir=tmp_path / "runs" / "one", world_size=1, say=print)
        (found,) = error.value.faults
        assert found.key == "model.name"
        return found.message

    return find


def _edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_sound_folder_passes(tmp_path, folder, run_config):
    assert preflight(run_config(), run_dir=tmp_path / "one", world_size=2, say=print).steps == 3


def test_missing_tensors_are_named(folder, fault):
    """Field case R72: strict, whatever is missing."""

    def drop(tensors):
        for name in [name for name in tensors if "layers.1" in name]:
            del tensors[name]

    _edit(folder / SINGLE, drop)
    message = fault()
    assert message.startswith(f"{folder} lacks 9 tensors (model.layers.1.self_attn.q_proj.weight, ")
    assert message.endswith(", and 4 more)")


def test_unexpected_tensors_are_named(folder, fault):
    _edit(folder / SINGLE, lambda tensors: tensors.update({"model.norm.bias": torch.zeros(16)}))
    assert fault() == f"{folder} holds 1 tensor (model.norm.bias) that the model of its config.json does not have"


def test_a_prefix_is_not_guessed(tmp_path, folder, run_config):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    _edit(folder / SINGLE, strip)
    with pytest.raises(ConfigError) as error:
        preflight(run_config(), run_dir=tmp_path / "one", world_size=1, say=print)
    assert [fault.message.split(" (")[0] for fault in error.value.faults] == [
        f"{folder} lacks 20 tensors",
        f"{folder} holds 20 tensors",
    ]


def test_wrong_shapes_are_named(folder, fault):
    _edit(folder / SINGLE, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(17)}))
    assert fault() == f"{folder / SINGLE}: model.norm.weight is of shape (17,), and the model's is (16,)"


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_weights_are_refused(dtype, name, folder, fault):
    key = "model.layers.0.mlp.down_proj.weight"
    _edit(folder / SINGLE, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))
    assert fault() == (
        f"{folder} holds 1 tensor ({key}) as {name}: quantised weights cannot be trained; give the model in one of "
        "F64, F32, F16, BF16"
    )


def test_old_rope_tables_are_passed_over(tmp_path, folder, run_config, make_trainer):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit(folder / SINGLE, lambda tensors: tensors.update({name: torch.zeros(2, dtype=torch.int64)}))
    assert preflight(run_config(), run_dir=tmp_path / "one", world_size=1, say=print).steps == 3
    make_trainer(run_config()).close()


def test_a_file_without_the_head_of_an_untied_model(folder, fault):
    """Field case R70: a tie that only the file has."""
    _edit(folder / SINGLE, lambda tensors: tensors.pop("lm_head.weight"))
    assert fault() == (
        f"{folder} lacks 1 tensor (lm_head.weight); if the head is the embedding, its config.json must say "
        "tie_word_embeddings = true"
    )


def test_pickles_are_never_read(tmp_path, folder, fault, capfd):
    """Field case R120: a planted pickle is refused with what to do instead."""

    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Planted()))
    assert len(open_weights(folder).tensors) == 21
    (folder / SINGLE).unlink()
    message = fault()
    assert message.startswith(f"{folder} holds its weights as model.pt only, a pickle, which can run code")
    assert "save_pretrained(NEW_DIR)" in message
    (folder / SINGLE).write_bytes(pickle.dumps(Planted()))
    assert "model.safetensors is damaged or cut short" in fault()
    assert not (tmp_path / "ran").exists()


def test_code_in_the_folder_never_runs(tmp_path, folder, tiny_tokenizer, run_config, make_trainer, monkeypatch):
    """Field case R120: remote code of model and tokenizer, asked for in every way a folder can."""
    shutil.copytree(tiny_tokenizer, folder, dirs_exist_ok=True)
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Evil: pass\n"
    for name in ("evil.py", "modeling_evil.py", "configuration_llama.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(code)
    for name, targets in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        values = json.loads((folder / name).read_text())
        values |= {"auto_map": targets, "trust_remote_code": True, "vocab_size": 512}
        (folder / name).write_text(json.dumps(values))

    def grow(tensors):
        for name in (EMBEDDING, "lm_head.weight"):
            tensors[name] = torch.zeros(512, 16)

    _edit(folder / SINGLE, grow)
    config = run_config(tokenizer={"name": str(folder)})
    preflight(config, run_dir=tmp_path / "one", world_size=1, say=print)
    make_trainer(config).close()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "target",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors", "..", "", "x.bin", "\x00.safetensors"],
)
def test_an_index_points_at_files_beside_it_only(target, shards, fault):
    _edit_index(shards, lambda files: files.update({EMBEDDING: target}))
    assert fault() == f"{shards / INDEX} points at {target!r}: only .safetensors files beside it are read"


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_links_out_of_the_folder_are_not_followed(name, tmp_path, folder, fault):
    (tmp_path / "outside").mkdir()
    target = tmp_path / "outside" / name
    (folder / SINGLE).rename(tmp_path / "outside" / SINGLE)
    (tmp_path / "outside" / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: SINGLE}}))
    (folder / name).symlink_to(target)
    assert fault() == f"{folder / name} is a link to {target}, outside of the folder: not followed"


def test_links_inside_the_folder_are_followed(folder):
    (folder / SINGLE).rename(folder / "weights")
    (folder / SINGLE).symlink_to("weights")
    assert len(open_weights(folder).tensors) == 21


def test_index_and_files_must_agree(shards, fault):
    first, *_, last = weight_file_names(shards)
    _edit_index(shards, lambda files: files.update({EMBEDDING: last}))
    assert fault() == f"{shards / INDEX} says that {EMBEDDING} is in {last}, which does not hold it"
    _edit_index(shards, lambda files: files.update({EMBEDDING: first, "ghost": last}))
    assert fault() == f"{shards / INDEX} says that ghost is in {last}, which does not hold it"
    _edit_index(shards, lambda files: files.pop("ghost"))
    _edit(shards / last, lambda tensors: tensors.update({EMBEDDING: torch.zeros(64, 16)}))
    assert fault() == f"{EMBEDDING} is in {shards / first} and in {shards / last}: only one of them can count"
    (shards / last).unlink()
    assert fault() == f"{shards / last} is missing, and {INDEX} names it; fetch the model anew"
    save_file({"x": torch.zeros(1)}, shards / SINGLE)
    assert fault() == f"{shards} holds both {SINGLE} and {INDEX} with other files: delete one of them"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_is_named(text, shards, fault):
    (shards / INDEX).write_text(text)
    assert fault().startswith(f"{shards / INDEX} ")


def test_a_folder_without_weights(folder, fault):
    (folder / SINGLE).unlink()
    assert fault() == (
        f"{folder} holds neither {SINGLE} nor {INDEX}, and weights in other formats are not read; with [model.init] "
        "only its config.json is needed"
    )
    (folder / SINGLE).mkdir()
    assert fault().startswith(f"{folder} holds neither")


def test_truncated_files_are_found_from_the_header(folder, fault):
    content = (folder / SINGLE).read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    for length in (0, 7, 8, 8 + header // 2, 8 + header, len(content) - 1):
        (folder / SINGLE).write_bytes(content[:length])
        assert fault().startswith(f"{folder / SINGLE} is damaged or cut short (")
    (folder / SINGLE).write_bytes(content + b"\0")
    assert fault().startswith(f"{folder / SINGLE} is damaged or cut short (")


_EDITS = st.lists(
    st.tuples(st.integers(0, 2**32), st.sampled_from(["flip", "set", "insert", "cut"]), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def _apply(content: bytes, edits: list[tuple[int, str, int]], length: int) -> bytes:
    damaged = bytearray(content)
    for place, kind, value in edits:
        place %= max(1, min(length, len(damaged)))
        match kind:
            case "flip":
                damaged[place] ^= 1 << value % 8
            case "set":
                damaged[place] = value
            case "insert":
                damaged.insert(place, value)
            case "cut":
                del damaged[place]
    return bytes(damaged)


def _try(folder: Path, parameters: dict[str, torch.Tensor]) -> None:
    """Every fault has a name, at both doors."""
    try:
        open_weights(folder)
    except ConfigError as error:
        assert all(fault.key == "model.name" and str(folder) in fault.message for fault in error.faults)
    try:
        load_weights(folder, parameters, tied={}, show_progress=False)
    except RunError:
        return
    assert all(bool(torch.isfinite(parameter).all()) for parameter in parameters.values())


_FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def test_fuzzed_headers(tmp_path, save_model):
    model = save_model(num_hidden_layers=1)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    path = tmp_path / "hf" / SINGLE
    content = path.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])

    @_FUZZ
    @given(edits=_EDITS)
    def run(edits):
        path.write_bytes(_apply(content, edits, 8 + header))
        _try(path.parent, parameters)

    run()


def test_fuzzed_indices(tmp_path, save_model):
    model = save_model(num_hidden_layers=1, max_shard_size="5KB")
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    path = tmp_path / "hf" / INDEX
    content = path.read_bytes()

    @_FUZZ
    @given(edits=_EDITS)
    def run(edits):
        path.write_bytes(_apply(content, edits, len(content)))
        _try(path.parent, parameters)

    run()


_NAMES = st.sampled_from([EMBEDDING, "model.norm.weight", "a", "", "\x1b[31m", "../x"])
_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "I64", "C64", "XX", "", 3, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 16, 64, 2**31, 2**63, 2**64, -1, 1.5, "a"]), max_size=3),
        "data_offsets": st.lists(st.sampled_from([0, 1, 4, 64, 4096, 2**63, 2**64 - 1, -1]), max_size=3),
    }
)


def test_headers_made_up(tmp_path):
    parameters = {EMBEDDING: torch.zeros(64, 16), "model.norm.weight": torch.zeros(16)}

    @_FUZZ
    @given(header=st.dictionaries(_NAMES, _ENTRY, max_size=3), data=st.sampled_from([0, 4, 64, 4096]))
    def run(header, data):
        text = json.dumps(header).encode()
        (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
        _try(tmp_path, parameters)

    run()
