"""A plain reference of every held-out metric: one document at a time, windows and bytes by their definitions,
log-softmax in float64. It shares no code with what it checks."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.validation import SuiteConfig
from models.base import CausalLM
from models.batch import IGNORE_INDEX
from models.init import init_weights
from models.registry import build_config, build_model
from trainer.data.collate import collate
from trainer.data.row import Rows
from trainer.validation import Validation, build_validation

Logits = Callable[[list[int]], np.ndarray]
"""Input ids to (inputs, vocab_size) float64."""

VOCAB_SIZE = 384
ARCH = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What a model made of the scored tokens of one text."""

    nats: float = 0.0
    text_nats: float = 0.0
    tokens: int = 0
    num_bytes: int = 0
    hits: int = 0

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Reference:
    """Scores documents one by one."""

    def __init__(self, logits: Logits, tokenizer: Any, *, context: str, seq_len: int) -> None:
        self._logits, self._tokenizer = logits, tokenizer
        self._prefixes, self._seq_len = context == "prefix", seq_len
        bos = tokenizer.bos_token_id
        self._prefix = tokenizer.eos_token_id if bos is None else bos

    def text(self, text: str) -> Scored:
        """A row of a set with `text`."""
        ids = self.encode(text)
        return self._windows(ids, [len(part) for part in self.spell(ids, text)])

    def token_document(self, ids: list[int]) -> Scored:
        """A document of token shards: the special token at its end is no text."""
        text = [id_ for id_ in ids if id_ not in self._tokenizer.all_special_ids]
        parts = iter(self.spell(text, None))
        return self._windows(ids, [0 if id_ in self._tokenizer.all_special_ids else len(next(parts)) for id_ in ids])

    def continuation(self, context: str, continuation: str) -> Scored | None:
        """Of a continuation; None where it has too many tokens, or none that may be scored."""
        moved = context[len(context.rstrip()) :]
        context, continuation = context.rstrip(), moved + continuation
        ids, num_context = self.encode(context + continuation), len(self.encode(context)) if context else 0
        sizes = [len(part) for part in self.spell(ids, context + continuation)]
        if num_context == 0 and self._prefixes:
            ids, sizes, num_context = [self._prefix, *ids], [0, *sizes], 1
        num_context = max(num_context, 1)
        scored = len(ids) - num_context
        if not 1 <= scored <= self._seq_len:
            return None
        inputs = ids[:-1][-self._seq_len :]
        return self._score(inputs, ids[-scored:], sizes[-scored:])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def spell(self, ids: list[int], text: str | None) -> list[bytes]:
        """Bytes of each token, which together are those of the text."""
        parts = _spell(self._tokenizer, ids)
        if text is not None:
            if b"".join(parts) == b" " + text.encode():
                parts[0] = parts[0][1:]  # a space that the tokenizer put there
            assert b"".join(parts) == text.encode()
        return parts

    def _windows(self, ids: list[int], sizes: list[int]) -> Scored:
        total, length = Scored(), self._seq_len
        if not self._prefixes:
            for start in range(0, len(ids), length):
                window, of_window = ids[start : start + length], sizes[start : start + length]
                total += self._score(window[:-1], window[1:], of_window[1:])
            return total
        ids, sizes = [self._prefix, *ids], [0, *sizes]
        for start in range(1, len(ids), length):
            end = min(start + length, len(ids))
            first_input = 0 if start == 1 else end - 1 - length
            total += self._score(ids[first_input : end - 1], ids[start:end], sizes[start:end])
        return total

    def _score(self, inputs: list[int], targets: list[int], sizes: list[int]) -> Scored:
        """The last tokens after `inputs` against `targets`."""
        assert len(inputs) <= self._seq_len
        if not targets:
            return Scored()
        logits = self._logits(inputs)[-len(targets) :]
        highest = logits.max(axis=1)
        nats = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
        nats -= logits[np.arange(len(targets)), targets]
        # A space that the tokenizer puts before a text is no byte of it, and costs nats all the same.
        is_text = ~np.isin(targets, self._tokenizer.all_special_ids)
        hits = int((logits.argmax(axis=1) == targets).sum())
        return Scored(
            nats=nats.sum(), text_nats=nats[is_text].sum(), tokens=len(targets), num_bytes=sum(sizes), hits=hits
        )


def _spell(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """Byte-level letters as GPT-2 assigns them, or SentencePiece's pieces and byte tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    if "<0x00>" in tokenizer.get_vocab():
        is_byte = [len(token) == 6 and token[:3] == "<0x" for token in tokens]
        return [
            bytes([int(token[3:5], 16)]) if byte else token.replace("▁", " ").encode()
            for token, byte in zip(tokens, is_byte, strict=True)
        ]
    return [bytes(byte_of[letter] for letter in token) for token in tokens]


def text_metrics(documents: Sequence[Scored]) -> dict[str, float]:
    """loss, perplexity and bpb."""
    total = sum(documents, Scored())
    loss = total.nats / total.tokens
    return {"loss": loss, "perplexity": math.exp(loss), "bpb": total.text_nats / math.log(2) / total.num_bytes}


def continuation_metrics(documents: Sequence[Scored | None]) -> dict[str, float]:
    """loss, bpb and acc over the documents that could be scored."""
    scored = [document for document in documents if document is not None]
    metrics = text_metrics(scored)
    del metrics["perplexity"]
    return metrics | {"acc": float(np.mean([document.hits == document.tokens for document in scored]))}


def option_metrics(rows: Sequence[dict[str, Any]], reference: Reference) -> dict[str, float]:
    """acc and acc_norm of the rows whose options could all be scored; margin of pairs."""
    acc, acc_norm, margins = [], [], []
    for row in rows:
        is_pair = "chosen" in row
        options = [row["chosen"], row["rejected"]] if is_pair else row["choices"]
        found = [reference.continuation(row.get("context") or "", option) for option in options]
        if None in found:
            continue
        nats = np.array([scored.nats for scored in found if scored is not None])
        per_byte = nats / [len(option.encode()) for option in options]
        answer = 0 if is_pair else row["answer"]
        # An equal second one makes a pair wrong; of choices the first one wins.
        acc.append(nats[0] < nats[1] if is_pair else nats.argmin() == answer)
        acc_norm.append(per_byte[0] < per_byte[1] if is_pair else per_byte.argmin() == answer)
        margins.append(nats[1] - nats[0])
    metrics = {"acc": float(np.mean(acc)), "acc_norm": float(np.mean(acc_norm))}
    return metrics | ({"margin": float(np.mean(margins))} if "chosen" in rows[0] else {})


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The functions above, for tests."""

    Reference: type[Reference] = Reference
    Scored: type[Scored] = Scored
    text_metrics: Callable[..., dict[str, float]] = text_metrics
    continuation_metrics: Callable[..., dict[str, float]] = continuation_metrics
    option_metrics: Callable[..., dict[str, float]] = option_metrics


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads: those wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[[torch.dtype], CausalLM]:
    """Ours, in either precision, with the same weights."""

    def build(dtype: torch.dtype) -> CausalLM:
        config = build_config(ARCH, tokenizer_length=None, special_ids={})
        model = build_model(config, seq_len=64, attn="sdpa", dtype=torch.float32)
        init_weights({n: p.detach() for n, p in model.named_parameters()}, std=0.2, seed=0, rules=model.init_rules())
        return model.to(dtype)

    return build


@pytest.fixture(scope="session")
def own_logits() -> Callable[[CausalLM], Logits]:
    """Logits of our model, for one document alone."""

    def of(model: CausalLM) -> Logits:
        @torch.no_grad()
        def logits(ids: list[int]) -> np.ndarray:
            rows = Rows.empty(1, len(ids))
            rows.input_ids[0] = ids
            rows.labels.fill(IGNORE_INDEX)
            rows.segment_lengths[0] = np.array([len(ids)])
            return model.logits(collate(rows, full_rows=False, pin_memory=False))[0].double().numpy()

        return logits

    return of


@pytest.fixture(scope="session")
def transformers_logits(tiny_llama: Callable[..., CausalLM]) -> Logits:
    """Logits of transformers' model with the weights of `tiny_llama`, in float64 but for its norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in ARCH.items() if k != "model_type"}))
    model.load_state_dict(tiny_llama(torch.float32).state_dict())
    model.double().eval()

    @torch.no_grad()
    def logits(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids])).logits[0].numpy()

    return logits


@pytest.fixture
def make_validation(tmp_path: Path, make_mesh: Callable[..., Any]) -> Callable[..., Validation]:
    """make_validation(tokenizer, {"name": rows or folder}, **suite keys)"""

    def make(tokenizer: Any, sets: dict[str, Any], **keys: Any) -> Validation:
        entries = []
        for name, content in sets.items():
            path = content
            if not isinstance(content, Path):
                path = tmp_path / f"{name}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in content))
            entries.append({"name": name, "path": path})
        arrays_dir = keys.pop("arrays_dir", None)
        config = SuiteConfig.model_validate({"sets": entries, "save_arrays": arrays_dir is not None, **keys})
        validation = build_validation(
            config,
            tokenizer=tokenizer,
            vocab_size=keys.get("vocab_size", VOCAB_SIZE),
            mesh=make_mesh(),
            pin_memory=False,
            chats=None,
            cache_dir=tmp_path / "cache",
            arrays_dir=arrays_dir,
        )
        assert validation is not None
        return validation

    return make


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Iterator[Any]:
    """Llama 2's kind: a space before every text, `▁` for spaces, byte tokens for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("o", "n"), ("é", "s"), ("▁", "▁")]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,é東"]
    vocab = {piece: id_ for id_, piece in enumerate([*pieces, *letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    yield PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
