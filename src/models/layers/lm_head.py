"""The output head: projection to the vocabulary fused with cross-entropy, a chunk of tokens at a time.

All logits of a batch in fp32 would be its largest tensor by far (8192 tokens x 128256 ids: 4.2 GB, and as much again
for their gradient). Here a chunk's logits are made, turned into losses and into gradients of the hidden states and of
the weight, and dropped, all in the forward pass. What stays for the backward pass is the size of the inputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.batch import IGNORE_INDEX

# Logits of one chunk: 512 MiB in fp32. Each chunk also reads and writes the whole gradient of the weight, so smaller
# chunks cost time (about a third of the chunk's products at 256 MiB, a vocabulary of 128k and a width of 2048).
_CHUNK_ELEMENTS = 2**27
_MIN_CHUNK_TOKENS = 256


class LMHead(nn.Module):
    """Head of a language model, without bias. Tied: it holds no weight and is given the embedding's."""

    def __init__(
        self, hidden_size: int, vocab_size: int, *, tied: bool, dtype: torch.dtype, logit_scale: float = 1.0
    ) -> None:
        """
        Args:
            hidden_size: width of the hidden states.
            vocab_size: ids.
            tied: there is no weight of its own.
            dtype: of the weight.
            logit_scale: factor of the logits.
        """
        super().__init__()
        self.logit_scale = logit_scale
        self.weight: nn.Parameter | None
        weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))
        self.register_parameter("weight", weight)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        loss_scale: Tensor | None,
        greedy: bool,
        tied_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cross-entropy of every position; see `linear_cross_entropy`.

        Args:
            hidden: (rows, seq_len, hidden_size)
            labels: (rows, seq_len)
            loss_scale: () or None for 1.
            greedy: also give the greedy hits.
            tied_weight: (vocab_size, hidden_size), required by a tied head.

        Returns:
            loss (), nats (rows, seq_len), greedy hits (rows, seq_len) or None.
        """
        loss, nats, hits = linear_cross_entropy(
            hidden.flatten(0, 1),
            self._weight(tied_weight),
            labels.flatten(),
            loss_scale=loss_scale,
            logit_scale=self.logit_scale,
            greedy=greedy,
        )
        return loss, nats.view(labels.shape), None if hits is None else hits.view(labels.shape)

    def logits(self, hidden: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """(rows, seq_len, hidden_size) -> (rows, seq_len, vocab_size) in fp32 (fp64 for fp64 inputs), all at once."""
        weight = self._weight(tied_weight)
        wide = _wide_dtype(hidden)
        logits = hidden.to(wide) @ weight.to(wide).T
        return logits if self.logit_scale == 1 else logits * self.logit_scale

    def _weight(self, tied_weight: Tensor | None) -> Tensor:
        weight = self.weight if tied_weight is None else tied_weight
        if weight is None:
            raise ValueError("a tied head needs the embedding's weight")
        return weight


def chunk_size(vocab_size: int) -> int:
    """Tokens whose logits are made at once."""
    return max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS // vocab_size)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_scale: Tensor | None = None,
    logit_scale: float = 1.0,
    greedy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy of `logit_scale * hidden @ weight.T` against `labels` without holding all logits.

    Logits, losses and the accumulated gradient of the weight are fp32 (fp64 for fp64 inputs). No host sync.

    Args:
        hidden: (tokens, hidden_size)
        weight: (vocab_size, hidden_size), dtype of `hidden`.
        labels: (tokens,) int64; IGNORE_INDEX gives 0 nats and no gradient.
        loss_scale: () factor of the loss; None is 1.
        logit_scale: factor of the logits.
        greedy: also say where the most likely id is the label.
        chunk_tokens: tokens per chunk; None picks it from the vocabulary.

    Returns:
        loss (): sum of nats times loss_scale, differentiable once in hidden and weight.
        nats (tokens,): -ln p(label), detached.
        greedy hits (tokens,) bool, or None when not asked for.
    """
    if chunk_tokens is None:
        chunk_tokens = chunk_size(weight.size(0))
    if loss_scale is None:
        loss_scale = torch.ones((), dtype=_wide_dtype(hidden), device=hidden.device)
    grad_enabled = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, loss_scale, logit_scale, greedy, chunk_tokens, grad_enabled
    )


def _wide_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _Products:
    """The three matrix products of the head, with fp32 results from bf16 operands.

    CUDA's products give fp32 from bf16 operands without a copy of them. Elsewhere the operands are widened first.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.wide = _wide_dtype(hidden)
        self.native = hidden.is_cuda and hidden.dtype != self.wide
        self.narrow = hidden.dtype
        self.weight = weight if self.native else weight.to(self.wide)  # (V, H)

    def logits(self, hidden: Tensor) -> Tensor:
        """(t, H) -> (t, V)"""
        if self.native:
            return torch.mm(hidden, self.weight.T, out_dtype=self.wide)
        return torch.mm(hidden.to(self.wide), self.weight.T)

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """(t, V) -> (t, H)"""
        return torch.mm(grad_logits, self.weight)

    def add_grad_weight(self, total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
        """total (V, H) += grad_logits.T (V, t) @ hidden (t, H)"""
        if self.native:
            torch.ops.aten.addmm.dtype_out(total, grad_logits.T, hidden, self.wide, out=total)
        else:
            total.addmm_(grad_logits.T, hidden.to(self.wide))

    def narrowed(self, grad_logits: Tensor) -> Tensor:
        """Gradient of the logits in the dtype that the products take."""
        return grad_logits.to(self.narrow) if self.native else grad_logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (T, H)
        weight: Tensor,  # (V, H)
        labels: Tensor,  # (T,)
        loss_scale: Tensor,  # ()
        logit_scale: float,
        greedy: bool,
        chunk_tokens: int,
        grad_enabled: bool,  # inside a Function grad mode is always off, so the caller's is passed in
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        products = _Products(hidden, weight)
        loss_scale = loss_scale.to(products.wide)
        grad_scale = loss_scale if logit_scale == 1 else loss_scale * logit_scale
        want_hidden, want_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=products.wide) if want_weight else None
        nats = torch.empty(labels.shape, dtype=products.wide, device=labels.device)
        hits = torch.empty(labels.shape, dtype=torch.bool, device=labels.device) if greedy else None

        for start in range(0, labels.numel(), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = products.logits(hidden[chunk])  # (t, V)
            if logit_scale != 1:
                logits.mul_(logit_scale)
            counted = labels[chunk] != IGNORE_INDEX
            targets = torch.where(counted, labels[chunk], 0)
            if hits is not None:
                hits[chunk] = (logits.argmax(-1) == targets) & counted
            # In place from here on: the chunk's logits become its probabilities, then its gradient.
            logits.sub_(logits.amax(-1, keepdim=True))
            target_logits = logits.gather(-1, targets[:, None]).squeeze(-1)
            sums = logits.exp_().sum(-1)
            nats[chunk] = torch.where(counted, sums.log() - target_logits, 0.0)
            if not (want_hidden or want_weight):
                continue
            factors = torch.where(counted, grad_scale, 0.0)  # (t,)
            logits.mul_((factors / sums)[:, None])
            target_grads = (target_logits.exp() / sums - 1) * factors
            logits.scatter_(-1, targets[:, None], target_grads[:, None])
            grad_logits = products.narrowed(logits)
            if grad_hidden is not None:
                grad_hidden[chunk] = products.grad_hidden(grad_logits)
            if grad_weight is not None:
                products.add_grad_weight(grad_weight, grad_logits, hidden[chunk])
            del logits, grad_logits  # or they would be there beside those of the next chunk

        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        not_differentiable = (nats,) if hits is None else (nats, hits)
        ctx.mark_non_differentiable(*not_differentiable)
        ctx.set_materialize_grads(False)
        return nats.sum() * loss_scale, nats, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grads = (None if grad is None or grad_loss is None else grad * grad_loss for grad in (grad_hidden, grad_weight))
        return (*grads, None, None, None, None, None, None)
