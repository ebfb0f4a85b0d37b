"""The proof that a model of transformers can be trained on packed documents, made each time before one is built.

Lists of what is known not to work go stale with the next release of transformers. So a small twin of the model (all
its layers and switches, narrow) is run on the CPU: its packed logits must be those of transformers' own model on each
document alone, and no token may act on another document or on an earlier position, to the last bit.
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from models.batch import IGNORE_INDEX, Batch, Segments
from models.errors import ArchError, one_line
from models.hf.modeling import TransformersForCausalLM, transformers_model
from models.hf.twin import VOCAB_SIZE, small_twin

_LENGTHS = (4, 1, 3)
_ROW_LENGTH = sum(_LENGTHS)
_CHANGED = (1, 4, 6)
"""Positions that are changed, one at a time: within documents, and a document of one token."""

# Rounding in fp32 gives 1e-6 to 1e-5; a feature left out gives 1e-3 and more with weights of this size.
_TOLERANCE = 1e-4
_STD = 0.15


def prove(config: PretrainedConfig, *, seq_len: int) -> dict[str, float | None]:
    """Check a small twin of the model that `config` describes.

    Args:
        config: of a causal language model of transformers.
        seq_len: longest row.

    Returns:
        for the vectors (norm gains, biases) by name: the one number they begin with in transformers; None where they
        do not begin with one number.

    Raises:
        ArchError: it cannot be computed exactly inside documents, or that cannot be checked.
    """
    twin_config = small_twin(config)
    # The checks draw numbers of their own: the caller's generator stays as it is.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = transformers_model(twin_config, attention="eager", dtype=torch.float32).eval()
        first_values = _first_values(reference)
        _spread(reference)
        model = _ours(twin_config, reference, min(seq_len, _ROW_LENGTH))
        _compare(model, reference)
    return first_values


def _ours(config: PretrainedConfig, reference: PreTrainedModel, seq_len: int) -> TransformersForCausalLM:
    """Ours with the reference's weights, built as in training: on meta first."""
    with torch.device("meta"):
        model = TransformersForCausalLM(config, seq_len=seq_len, attn="sdpa", dtype=torch.float32)
    model.to_empty(device=torch.device("cpu"))
    weights = {model.own_name(name): parameter for name, parameter in reference.named_parameters()}
    if set(weights) != set(dict(model.named_parameters())):
        raise ArchError("model_type", f"{config.model_type}: parameters differ from transformers'")
    model.load_state_dict(weights, strict=False)
    ours = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        if not torch.equal(buffer, ours[name]):
            raise ArchError("model_type", f"{config.model_type}: the buffer {name} cannot be made again")
    return model


def _first_values(reference: PreTrainedModel) -> dict[str, float | None]:
    vectors = {name: parameter.flatten() for name, parameter in reference.named_parameters() if parameter.dim() < 2}
    return {name: vector[0].item() if bool((vector == vector[0]).all()) else None for name, vector in vectors.items()}


def _spread(reference: PreTrainedModel) -> None:
    """Weights that make every part of the network felt: first values leave attention nearly flat."""
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=_STD)
            else:
                parameter.normal_(0.0, _STD)


def _compare(model: TransformersForCausalLM, reference: PreTrainedModel) -> None:
    family = model.config.model_type
    ids = torch.randint(VOCAB_SIZE, (_ROW_LENGTH,))
    originals = ids.repeat(len(_CHANGED), 1)
    changed = originals.clone()
    positions = torch.tensor(_CHANGED)[:, None]
    changed.scatter_(1, positions, (changed.gather(1, positions) + 1) % VOCAB_SIZE)
    try:
        # Without the device contexts around this, which cost more time than these small tensors.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            packed = model.logits(_batch(originals))
            # The same shape once more, so that each row of both is computed alike.
            moved = (model.logits(_batch(changed)) != packed).any(-1)  # (rows, row length)
            alone = [reference(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(_LENGTHS)]
    except Exception as error:  # whatever a model's code stumbles over
        raise ArchError("model_type", f"{family} cannot be computed inside documents: {one_line(error)}") from error
    expected = torch.cat(alone)
    error = (packed[0] - expected).abs().max() / expected.abs().max()
    if not bool(error < _TOLERANCE):
        raise ArchError(
            "model_type", f"{family} on packed documents differs from transformers' on each alone (by {error:.1e})"
        )
    document = torch.repeat_interleave(torch.tensor(_LENGTHS)).expand_as(moved)
    same = document == document.gather(1, positions)
    later = torch.arange(_ROW_LENGTH) >= positions
    if bool((moved & ~(same & later)).any()) or not bool(moved.gather(1, positions).all()):
        raise ArchError("model_type", f"tokens of {family} act on other documents or on earlier positions: not exact")


def _batch(ids: Tensor) -> Batch:
    """(rows, row length) ids as a batch; all rows are cut into documents alike."""
    lengths = _LENGTHS * len(ids)
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
