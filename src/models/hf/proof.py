"""The proof that a model of transformers can be trained on packed documents, made each time before one is built.

Lists of what is known not to work go stale with the next release of transformers. So a small twin of the model (all
its layers and switches, narrow) is run on the CPU: its packed logits must be those of transformers' own model on each
document alone, and no token may act on another document or on an earlier position, to the last bit.
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from models.batch import IGNORE_INDEX, Batch, Segments
from models.errors import ArchError
from models.hf.modeling import TransformersForCausalLM, transformers_model
from models.hf.twin import VOCAB_SIZE, small_twin

_ROWS = ((6, 1, 9), (11, 5))
_ROW_LENGTH = 16
# Rounding in fp32 gives 1e-6 to 1e-5; a feature left out gives 1e-3 and more with weights of this size.
_TOLERANCE = 1e-4
_SPREAD = 0.25


def prove(config: PretrainedConfig) -> frozenset[str]:
    """Check a small twin of the model that `config` describes.

    Args:
        config: of a causal language model of transformers; rows of 16 tokens must be allowed.

    Returns:
        names of all parameters whose first values are 1 in transformers; other vectors begin with 0.

    Raises:
        ArchError: it cannot be computed exactly inside documents, or that cannot be checked.
    """
    twin_config = small_twin(config)
    # The checks draw numbers of their own: the caller's generator stays as it is.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = transformers_model(twin_config, attention="eager", dtype=torch.float32).eval()
        first_ones = _first_ones(reference)
        _spread(reference)
        model = _ours(twin_config, reference)
        _compare(model, reference)
    return first_ones


def _ours(config: PretrainedConfig, reference: PreTrainedModel) -> TransformersForCausalLM:
    """Ours with the reference's weights, built as in training: on meta first."""
    with torch.device("meta"):
        model = TransformersForCausalLM(config, seq_len=_ROW_LENGTH, attn="sdpa", dtype=torch.float32)
    model.to_empty(device=torch.device("cpu"))
    weights = dict(reference.named_parameters())
    if set(weights) != set(dict(model.named_parameters())):
        raise ArchError("model_type", f"{config.model_type}: parameters differ from transformers'")
    model.load_state_dict(weights, strict=False)
    ours = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        if not torch.equal(buffer, ours[name]):
            raise ArchError("model_type", f"{config.model_type}: the buffer {name} cannot be made again")
    return model


def _first_ones(reference: PreTrainedModel) -> frozenset[str]:
    vectors = {name: parameter for name, parameter in reference.named_parameters() if parameter.dim() < 2}
    for name, vector in vectors.items():
        if not bool((vector == vector.flatten()[0]).all()) or vector.flatten()[0].item() not in (0.0, 1.0):
            return frozenset()
    return frozenset(name for name, vector in vectors.items() if bool((vector == 1).all()))


def _spread(reference: PreTrainedModel) -> None:
    """Weights that make every part of the network felt: first values leave attention nearly flat."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=_SPREAD)
            else:
                parameter.normal_(0.0, _SPREAD)


def _compare(model: TransformersForCausalLM, reference: PreTrainedModel) -> None:
    family = model.config.model_type
    ids = torch.randint(VOCAB_SIZE, (len(_ROWS), _ROW_LENGTH))
    try:
        with torch.no_grad():
            packed = model.logits(_batch(ids))
            alone = [
                reference(input_ids=document[None], use_cache=False).logits[0]
                for row, lengths in zip(ids, _ROWS, strict=True)
                for document in row.split(lengths)
            ]
            expected = torch.cat(alone).view(packed.shape)
            error = (packed - expected).abs().max() / expected.abs().max()
            if not bool(error < _TOLERANCE):
                raise ArchError(
                    "model_type",
                    f"{family} on packed documents differs from transformers' on each alone (by {error:.1e})",
                )
            _check_independence(model, ids)
    except ArchError:
        raise
    except Exception as error:  # whatever a model's code stumbles over
        line = " ".join(str(error).split())[:300] or type(error).__name__
        raise ArchError("model_type", f"{family} cannot be computed inside documents: {line}") from error


def _check_independence(model: TransformersForCausalLM, ids: Tensor) -> None:
    """Change one position at a time: nothing moves but what comes later in the same document."""
    originals = ids.repeat(_ROW_LENGTH, 1)  # (positions * rows, row length): a copy for each position
    changed = originals.clone()
    positions = torch.arange(_ROW_LENGTH).repeat_interleave(len(_ROWS))
    changed[torch.arange(len(changed)), positions] += 1
    # The same shape twice, so that each row of both is computed alike.
    moved = (model.logits(_batch(changed % VOCAB_SIZE)) != model.logits(_batch(originals))).any(-1)
    document = torch.stack([torch.repeat_interleave(torch.tensor(lengths)) for lengths in _ROWS])
    document = document.repeat(_ROW_LENGTH, 1)  # number of the document within the row
    same = document == document.gather(1, positions[:, None])
    later = torch.arange(_ROW_LENGTH) >= positions[:, None]
    if bool((moved & ~(same & later)).any()) or not bool(moved.gather(1, positions[:, None]).all()):
        family = model.config.model_type
        raise ArchError("model_type", f"tokens of {family} act on other documents or on earlier positions: not exact")


def _batch(ids: Tensor) -> Batch:
    """A batch of `ids` (rows, row length), whose rows are cut into documents as `_ROWS` says, over and over."""
    lengths = [length for row in _ROWS for length in row] * (len(ids) // len(_ROWS))
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(ids.shape)
    longest = torch.empty((max(lengths), 0))
    segments = Segments(cu_seqlens=borders, host_cu_seqlens=borders, max_seqlen_carrier=longest, full_rows=False)
    return Batch(
        input_ids=ids,
        labels=torch.full_like(ids, IGNORE_INDEX),
        position_ids=positions,
        segments=segments,
        num_loss_tokens=0,
        num_padding_tokens=0,
        attention_pairs=0,
    )
