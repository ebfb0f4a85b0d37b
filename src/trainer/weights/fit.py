"""Whether the weights of a folder are those of a model: all of them, of its shapes, and no others."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from configs.errors import Fault
from models.base import CausalLM
from trainer.text import listed
from trainer.weights.folder import WeightFiles
from trainer.weights.write import DTYPE_NAMES

FILE_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point}
"""safetensors' names of the dtypes that hold weights as they are; others are quantised."""

# Old exports keep the RoPE table, which is computed.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_SHOWN = 5


def check_fit(files: WeightFiles, model: CausalLM, *, vocab_size: int) -> Iterator[Fault]:
    """What keeps the files from being the weights of `model`, from headers alone; faults at `model.name`.

    Args:
        model: on any device, meta too.
        vocab_size: rows that the files' vocabulary should have; the model's may have grown.
    """
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if name not in files.tensors]
    known = {*parameters, *model.tied_names}
    unexpected = [name for name in files.tensors if name not in known and not is_ignored(name)]
    if missing:
        yield _fault(f"{files.folder} lacks {_listed(missing)}{_tie_advice(model, missing)}")
    if unexpected:
        yield _fault(f"{files.folder} holds {_listed(unexpected)} that the model of its config.json does not have")
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    shapes |= {name: (vocab_size, *shapes[name][1:]) for name in model.vocabulary_names}
    shapes |= {name: shapes[target] for name, target in model.tied_names.items()}
    yield from check_tensors(files, shapes)


def is_ignored(name: str) -> bool:
    """Whether a tensor in a file is passed over: old exports keep the RoPE table."""
    return _IGNORED.search(name) is not None


def check_tensors(files: WeightFiles, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[Fault]:
    """Dtypes of the wanted tensors that the files hold, and their shapes against the wanted ones."""
    found = {name: files.tensors[name] for name in wanted if name in files.tensors}
    quantised = [name for name, stored in found.items() if stored.dtype not in FILE_DTYPES]
    if quantised:
        dtypes = sorted({found[name].dtype for name in quantised})
        yield _fault(
            f"{files.folder} holds {_listed(quantised)} as {', '.join(dtypes)}: quantised weights cannot be trained; "
            f"give the model in one of {', '.join(FILE_DTYPES)}"
        )
    wrong = [(name, stored) for name, stored in found.items() if stored.shape != wanted[name]]
    for name, stored in wrong[:_SHOWN]:
        yield _fault(f"{stored.file}: {name} is of shape {stored.shape}, and the model's is {wanted[name]}")


def _tie_advice(model: CausalLM, missing: Iterable[str]) -> str:
    tied = {id(matrix) for matrix in model.vocabulary_matrices[1:]}
    heads = {name for name, parameter in model.named_parameters() if id(parameter) in tied}
    if set(missing) != heads:
        return ""
    return "; if the head is the embedding, its config.json must say tie_word_embeddings = true"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({listed(names, _SHOWN)})"


def _fault(message: str) -> Fault:
    return Fault(key="model.name", message=message)
