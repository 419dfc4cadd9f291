"""Cross-entropy over the vocabulary in chunks of tokens, so that the full logits never exist.

The gradients of the hidden states and of the output matrix are computed chunk by chunk in the forward pass,
while the chunk's logits are at hand: the same three matrix products as the plain loss, without keeping T·V
numbers. Another precision puts products of its own in their place.

Shape letters: T tokens, E hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.model.initial import is_fake
from orchestra.model.logits import EAGER, LogitsPasses, wide_type
from orchestra.model.weight_gradients import add_product_, ticket_of, weight_gradient
from orchestra.sizes.memory.loss_memory import chunk_tokens, logit_bytes

# Targets with this value take no part in the loss (torch's own default of cross_entropy).
IGNORED_TARGET = -100
# What is called like `cross_entropy_sum` and may take its place.
Loss = Callable[..., Tensor]


class OutputProducts(Protocol):
    """The products with the output matrix for the tokens of one micro-batch.

    The gradient of logits comes to them in `gradient_dtype` and for a loss that is multiplied by
    `gradient_factor`, which the results make up for.
    """

    gradient_factor: float | Tensor
    gradient_dtype: torch.dtype

    def logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the logits [C, V] of some tokens."""

    def take_gradient(
        self, grad_CV: Tensor, rows: slice, hidden_CE: Tensor, sum_VE: Tensor, *, adds: bool
    ) -> None:
        """Write the gradient of those tokens' hidden states, and write or add that of the matrix."""


# Makes them of hidden states [T, E], a matrix, how many of its rows are words, and the loss' factor.
MakeProducts = Callable[[Tensor, Tensor, int, float | Tensor], OutputProducts]


class PlainProducts:
    """Products in the dtype of the matrix."""

    def __init__(
        self, hidden_TE: Tensor, weight: Tensor, num_words: int, gradient_factor: float | Tensor
    ) -> None:
        self._hidden_TE, self._weight_VE = hidden_TE, weight[:num_words]
        self.gradient_factor, self.gradient_dtype = gradient_factor, weight.dtype

    def logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        return torch.mm(self._hidden_TE[rows], self._weight_VE.t(), out=out)

    def take_gradient(
        self, grad_CV: Tensor, rows: slice, hidden_CE: Tensor, sum_VE: Tensor, *, adds: bool
    ) -> None:
        torch.mm(grad_CV, self._weight_VE, out=hidden_CE)
        add_product_(sum_VE, grad_CV.t(), self._hidden_TE[rows], adds=adds)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        target_T: Tensor,
        scale: float | Tensor,
        chunk: int,
        passes: LogitsPasses,
        make_products: MakeProducts,
        has_backward: bool,
        token_losses_T: Tensor | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=wide_type(hidden_TE), device=hidden_TE.device)
        # That a parameter needs its gradient a Function hears even where gradients are switched off.
        needs_gradients = has_backward and any(ctx.needs_input_grad[:2])
        products = make_products(hidden_TE, weight_VE, len(weight_VE), scale)
        grads = (
            ChunkGradients(products, hidden_TE, weight_VE, len(weight_VE), chunk) if needs_gradients else None
        )
        logits_CV = hidden_TE.new_empty((min(chunk, len(hidden_TE)), len(weight_VE)))
        for start in range(0, len(hidden_TE), chunk):
            rows = slice(start, start + chunk)
            chunk_CV = logits_CV[: len(hidden_TE[rows])]
            products.logits(rows, out=chunk_CV)
            taken = target_T[rows] != IGNORED_TARGET
            index = torch.where(taken, target_T[rows], 0)
            found = passes.statistics(chunk_CV, index)
            losses_C = (found.sums.log() - (found.at_index - found.largest)) * taken
            total += losses_C.sum() * scale
            if token_losses_T is not None:
                token_losses_T[rows] = losses_C
            if grads is not None:
                factor = taken.to(found.sums.dtype) * products.gradient_factor
                dtype = products.gradient_dtype
                grads.add(passes.gradient(found, index, factor / found.sums, factor, dtype), rows)
        if grads is not None:
            ctx.save_for_backward(grads.hidden_TE, grads.finished())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(grads[0], *ctx.saved_tensors), *[None] * 7


def scaled_gradients(
    grad: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the hidden states and the output matrix, multiplied by the loss' own gradient.

    The scale is in them already, so that one is 1 in training. There the matrix' gradient has been taken
    before anybody could know it: then None stands for it, and only 1 is right. Looking costs nothing on CPU;
    on a GPU it would mean waiting for it, and in a dry run there is nothing to see.
    """
    is_known = not (grad.is_cuda or is_fake(grad))
    is_one = is_known and bool(grad == 1)
    if grad_weight is None:
        assert is_one or not is_known, "the output matrix' gradient was taken for a loss that nobody scales"
        return grad_hidden, None
    return (grad_hidden, grad_weight) if is_one else (grad_hidden * grad, grad_weight * grad)


class ChunkGradients:
    """The gradients of the summed loss, filled chunk by chunk of at most `chunk` tokens.

    That of the output matrix goes to the `WeightGradient` of `owner` if it has one; words are its first rows.
    The parts of several chunks are summed in fp32, and apart where it is kept in 16 bits.
    """

    def __init__(
        self, products: OutputProducts, hidden_TE: Tensor, owner: Tensor, num_words: int, chunk: int
    ) -> None:
        self._products = products
        self.hidden_TE = torch.empty_like(hidden_TE)
        self._owner = owner
        ticket = ticket_of(owner)
        self._target = None if ticket is None else weight_gradient(ticket)
        self._adds = self._is_direct = False
        wide = wide_type(hidden_TE)
        if self._target is not None:
            self._memory, self._adds = self._target.begin()
            self._is_direct = self._memory.dtype is wide or len(hidden_TE) <= chunk
        if self._is_direct:
            self._sum_VE = self._memory[:num_words]
        else:
            self._sum_VE = torch.empty_like(owner[:num_words], dtype=wide)

    def add(self, grad_logits_CV: Tensor, rows: slice) -> None:
        """Take the gradients of a chunk whose logits have the gradient [C, V], as the products want it."""
        adds = rows.start > 0 or (self._is_direct and self._adds)
        self._products.take_gradient(grad_logits_CV, rows, self.hidden_TE[rows], self._sum_VE, adds=adds)

    def finished(self) -> Tensor | None:
        """Return the output matrix' gradient in its shape and dtype, or None where it has been taken."""
        num_words = len(self._sum_VE)
        if self._target is None:
            grad_VE = self._sum_VE.to(self._owner.dtype)
            missing = len(self._owner) - num_words
            return F.pad(grad_VE, (0, 0, 0, missing)) if missing else grad_VE
        if not self._is_direct:
            head = self._memory[:num_words]
            head.add_(self._sum_VE) if self._adds else head.copy_(self._sum_VE)
        if not self._adds:
            self._memory[num_words:].zero_()
        self._target.end()
        return None


def cross_entropy_sum(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    target_T: Tensor,
    *,
    scale: float | Tensor = 1.0,
    chunk: int | None = None,
    passes: LogitsPasses = EAGER,
    products: MakeProducts = PlainProducts,
    token_losses: Tensor | None = None,
) -> Tensor:
    """Return `scale` times the summed cross-entropy of hidden @ weightᵀ against the targets, in nats, as a
    scalar of at least fp32.

    `scale` is a number, or one on the device. Targets equal to IGNORED_TARGET are left out. `chunk` is the
    number of tokens whose logits exist at once; `passes` go over them, and `products` make them. The loss of
    each token, without `scale`, is written to `token_losses` [T], which changes no bit of anything else.
    """
    rows = chunk or default_chunk(hidden_TE, len(target_T), len(weight_VE), passes)
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_TE,
        weight_VE,
        target_T,
        scale,
        rows,
        passes,
        products,
        torch.is_grad_enabled(),
        token_losses,
    )


def default_chunk(hidden_TE: Tensor, num_tokens: int, num_words: int, passes: LogitsPasses) -> int:
    """Return how many tokens' logits of `num_words` exist at once where nobody says."""
    bytes_each = logit_bytes(hidden_TE.element_size(), passes.is_compiled)
    return chunk_tokens(num_tokens, num_words, bytes_each, on_gpu=hidden_TE.is_cuda)
