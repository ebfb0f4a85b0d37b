"""What the scores of a set say. Sums run over documents in their order, in float64: no metric depends on which rank,
row or forward pass a document was in.

A sequence without a scored token has no window and counts nowhere. Where a model gives no number (NaN), nor does a
metric.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from trainer.errors import RunError
from trainer.validation.task import perplexity
from trainer.validation.windows import DocumentScores, Scores


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which sequences are the options of which document."""

    borders: np.ndarray
    """(documents + 1,) int64, strictly ascending from 0: document i has the sequences borders[i] to borders[i + 1]."""

    answers: np.ndarray
    """(documents,) int64: the right option of each, from 0 within the document."""

    num_bytes: np.ndarray
    """(sequences,) int64: UTF-8 bytes of each option's text as it was given."""

    firsts: np.ndarray
    """(sequences,) int64: the first sequence of its document with the same tokens, most often itself. Equal options
    cost the same; scored in different rows, they would differ by rounding, and a tie would depend on the packing."""

    @property
    def right(self) -> np.ndarray:
        """(documents,) int64: sequence of the right option."""
        return self.borders[:-1] + self.answers


def text_metrics(scores: Scores) -> dict[str, float]:
    """loss = sum of nats / scored tokens; perplexity = exp(loss);
    bpb = sum of the nats of tokens that spell text / (ln 2 * sum of their UTF-8 bytes).

    Raises:
        RunError: no token that spells text was scored.
    """
    loss = _loss(scores)
    return {"loss": loss, "perplexity": perplexity(loss), "bpb": _bits_per_byte(scores)}


def continuation_metrics(scores: Scores) -> dict[str, float]:
    """loss and bpb as for texts, over the continuations; acc: the share of documents in which every scored token was
    the model's first choice.

    Raises:
        RunError: no token that spells text was scored.
    """
    loss, bits_per_byte = _loss(scores), _bits_per_byte(scores)
    return {"loss": loss, "bpb": bits_per_byte, "acc": _share(_all_hit(scores), scores.nats[_scored(scores)])}


def pair_metrics(scores: Scores, options: Options) -> dict[str, float]:
    """acc: the share of documents whose chosen text has fewer nats than the rejected one; acc_norm: fewer nats per
    byte of its text; margin: mean of nats(rejected) - nats(chosen). A tie is not right.

    Raises:
        RunError: no document was scored.
    """
    kept, costs = _kept(scores, options), scores.nats[options.firsts]
    nats, per_byte = costs.reshape(-1, 2), (costs / options.num_bytes).reshape(-1, 2)
    return {
        "acc": _share((nats[:, 0] < nats[:, 1])[kept], nats[kept]),
        "acc_norm": _share((per_byte[:, 0] < per_byte[:, 1])[kept], nats[kept]),
        "margin": _mean((nats[:, 1] - nats[:, 0])[kept]),
    }


def choice_metrics(scores: Scores, options: Options) -> dict[str, float]:
    """acc: the share of documents whose right option has the fewest nats of all; acc_norm: the fewest nats per byte of
    its text. Of options that tie, the model has chosen the first.

    Raises:
        RunError: no document was scored.
    """
    kept, costs = _kept(scores, options), scores.nats[options.firsts]
    nats = _sums(costs, options.borders)[kept]
    best = _fewest(costs, options.borders) == options.answers
    best_norm = _fewest(costs / options.num_bytes, options.borders) == options.answers
    return {"acc": _share(best[kept], nats), "acc_norm": _share(best_norm[kept], nats)}


def text_records(scores: Scores, numbers: np.ndarray) -> DocumentScores:
    """Of documents with one sequence each.

    Args:
        numbers: (sequences,) int64: number of the document of each.
    """
    scored = _scored(scores)
    return _records(scores, scored, numbers[scored])


def continuation_records(scores: Scores, numbers: np.ndarray) -> DocumentScores:
    """As text_records; correct: every scored token was the model's first choice."""
    scored = _scored(scores)
    return _records(scores, scored, numbers[scored], correct=_all_hit(scores))


def pair_records(scores: Scores, options: Options, numbers: np.ndarray) -> DocumentScores:
    """Of documents with a chosen and a rejected text; correct as in `acc`.

    Args:
        numbers: (documents,) int64: number of each.
    """
    nats = scores.nats[options.firsts].reshape(-1, 2)
    return _option_records(scores, options, numbers, nats[:, 0] < nats[:, 1])


def choice_records(scores: Scores, options: Options, numbers: np.ndarray) -> DocumentScores:
    """Of documents with any number of options; correct as in `acc`. `numbers` as of pair_records."""
    best = _fewest(scores.nats[options.firsts], options.borders)
    return _option_records(scores, options, numbers, best == options.answers)


def _option_records(scores: Scores, options: Options, numbers: np.ndarray, correct: np.ndarray) -> DocumentScores:
    kept = _kept(scores, options)
    ranges = zip(options.borders[kept].tolist(), options.borders[kept + 1].tolist(), strict=True)
    costs = scores.nats[options.firsts]
    option_nats = [costs[low:high] for low, high in ranges]
    scores = replace(scores, nats=costs)
    return _records(scores, options.right[kept], numbers[kept], correct=correct[kept], option_nats=option_nats)


def _records(
    scores: Scores,
    sequences: np.ndarray,
    documents: np.ndarray,
    *,
    correct: np.ndarray | None = None,
    option_nats: list[np.ndarray] | None = None,
) -> DocumentScores:
    return DocumentScores(
        documents=documents,
        nats=scores.nats[sequences],
        num_tokens=scores.num_tokens[sequences].astype(np.int64),
        num_bytes=scores.num_bytes[sequences].astype(np.int64),
        correct=correct,
        option_nats=option_nats,
    )


def _scored(scores: Scores) -> np.ndarray:
    """Sequences with a scored token."""
    return np.flatnonzero(scores.num_tokens)


def _kept(scores: Scores, options: Options) -> np.ndarray:
    """Documents that were scored: all of their options were, or none."""
    return np.flatnonzero(scores.num_tokens[options.right])


def _all_hit(scores: Scores) -> np.ndarray:
    scored = _scored(scores)
    return scores.hits[scored] == scores.num_tokens[scored]


def _fewest(costs: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """(documents,) int64: the option of the lowest cost of each, the first one of several; past the last option where
    a cost is no number."""
    sizes = np.diff(borders)
    lowest = np.repeat(np.minimum.reduceat(costs, borders[:-1]), sizes) if len(sizes) else costs
    places = np.arange(len(costs)) - np.repeat(borders[:-1], sizes)
    candidates = np.where(costs == lowest, places, len(costs))
    return np.minimum.reduceat(candidates, borders[:-1]) if len(sizes) else places


def _sums(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """(documents,) over the options of each."""
    return np.add.reduceat(values, borders[:-1]) if len(borders) > 1 else values


def _loss(scores: Scores) -> float:
    tokens = float(scores.num_tokens.sum())
    if not tokens:
        raise RunError("no token was scored")
    return float(scores.nats.sum()) / tokens


def _bits_per_byte(scores: Scores) -> float:
    num_bytes = float(scores.num_bytes.sum())
    if not num_bytes:
        raise RunError("no token that spells text was scored")
    return float(scores.text_nats.sum()) / (math.log(2) * num_bytes)


def _share(correct: np.ndarray, nats: np.ndarray) -> float:
    """Of documents that are right; `nats` of all that was compared."""
    return math.nan if np.isnan(nats).any() else _mean(correct.astype(np.float64))


def _mean(values: np.ndarray) -> float:
    if not len(values):
        raise RunError("no document was scored")
    return float(values.sum()) / len(values)
