"""AdamW over fp32 masters: decay groups, clipping and the skip of a bad step are all inside torch's fused
kernel.

The kernel divides gradients by `grad_scale` and leaves everything as it is where `found_inf` is 1: torch's
own gradient scaler works so. Clipping and skipping through them costs no extra pass over the gradients and no
wait for the device.

Masters are updated some at a time, as their gradients come: whoever shards or rounds them can begin to send
the first while the last are still to be done. The state is made with the optimizer, not at the first step:
what a run needs is taken before it trains, and a restored state is written into it in place. It consists of
two moments for each master and one count of updates for all of them.

Each element of state goes through memory once: what the kernel wants in fp32 (16-bit gradients, moments kept
in bf16) is converted some elements at a time, and the new masters are rounded into the parameters while they
are in the cache; on a GPU one compiled pass does both (`compiled_update`). Moments in bf16 are rounded
stochastically. Masters may lie in host memory (`parallelism.offload`): the state lies where they do. With
state on disk each update is given masters and moments that are in memory for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.schema import OptimConfig, StateDType
from orchestra.model.initial import is_fake, mixed_bits, random_key
from orchestra.optim.compiled_update import ROW, CompiledUpdate
from orchestra.sizes.memory.step_memory import ROUNDED_CPU, ROUNDED_GPU

# Stochastic rounding of fp32 to bf16: up or down with the probabilities that keep the mean.
#
# A moment that is rounded to nearest stands still as soon as its change of one step is below half of bf16's
# last digit (1/256 of it); rounded stochastically it moves by the right amount on average. The random bits
# are a function of (seed, step, name, global index) by the generator of the initial values: every layout
# rounds alike, a run that goes on from a checkpoint rounds as it would have, and there is no state to save.


# Digits of fp32 that bf16 does not have.
_LOST_BITS = 16
_LOST_MASK = (1 << _LOST_BITS) - 1


def round_stochastically_(out: Tensor, values: Tensor, bits: Tensor, number: int = 0) -> None:
    """Fill the bf16 `out` with finite fp32 values of its shape; a number that bf16 holds stays as it is.

    `number`, 0 to 3, says which 16 of the 64 random bits of each element are used.
    """
    lost = ((bits >> (_LOST_BITS * number)) & _LOST_MASK).to(torch.int32)
    # Adding to the lower digits of a finite number carries into the upper ones, whatever its sign.
    carried = (values.contiguous().view(torch.int32) + lost) & ~_LOST_MASK
    out.copy_(carried.view(torch.float32))


# torch's names of the state that has a master's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements: where copies begin, and a multiple of what the kernel takes at once.
_ALIGNMENT = 32
# Elements of one dot product of a norm.
_DOT_LENGTH = 1 << 16
# Squares of 16-bit numbers have few bits, and rounding takes more from them than it gives: 5e-7 of a sum so,
# 2e-6 with the length above.
_DOT_LENGTH_OF_16_BITS = 1 << 14


@dataclass(frozen=True)
class Trained:
    """One parameter in training: the tensor the model computes with, and the one the optimizer updates.

    `master` holds the elements [start, stop) of the parameter as it lies in memory: in the parameter's shape
    where these are all of it, one-dimensional where they are fewer, empty where other ranks have them all. It
    shares the parameter's memory unless the model computes in 16 bits; then it is its fp32 original.
    `moments` are the two of the master's shape where their memory is given; None: the optimizer makes them.
    """

    name: str
    parameter: Tensor
    master: Tensor
    start: int
    stop: int
    moments: tuple[Tensor, Tensor] | None = None


# Returns the int64 flat indices, in the whole parameter, of the elements [start, stop) of what a rank holds.
GlobalIndex = Callable[[Trained, int, int], Tensor]


class AdamW:
    """AdamW by torch's fused kernel: matrices with weight decay, norm gains and biases (one dim) without.

    `state` has the moments by master; `lr` is set before each step. `seed` and `global_index` choose the
    random bits of rounded moments. `is_compiled`: 16-bit gradients are taken by one compiled pass. `names`
    are those of all the model's parameters, where this rank trains some of them. `rates`: what multiplies the
    learning rate of a parameter, by its name, where that is not 1; its decay stays lr · weight_decay.
    """

    takes_all_at_once = False

    def __init__(
        self,
        trained: Sequence[Trained],
        optim: OptimConfig,
        seed: int,
        global_index: GlobalIndex,
        *,
        is_compiled: bool = False,
        names: Iterable[str] | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        device = trained[0].master.device
        self.lr = optim.lr
        self._is_rounded = optim.state_dtype is StateDType.bf16
        dtype = torch.bfloat16 if self._is_rounded else None
        self.state: Mapping[Tensor, Mapping[str, Tensor]] = {
            item.master: {name: torch.zeros_like(item.master, dtype=dtype) for name in MOMENTS}
            if item.moments is None
            else dict(zip(MOMENTS, item.moments, strict=True))
            for item in trained
        }
        # Both moments of every parameter have its shape.
        self.kinds: dict[str, dict[str, tuple[int, ...] | None]] = {
            name: dict.fromkeys(MOMENTS) for name in (names or [item.name for item in trained])
        }
        self._seed, self._global_index = seed, global_index
        self._step = 0
        # In fp32 and on the device, as the kernel reads it.
        self._num_updates = torch.zeros((), dtype=torch.float32, device=device)
        self._rates = rates or {}
        self._weight_decay = optim.weight_decay
        self._betas = optim.betas
        self._eps = optim.eps
        self._clip_norm = optim.clip_norm
        betas = (optim.betas[0], optim.betas[1])
        self._compiled = CompiledUpdate(betas, optim.eps) if is_compiled and not self._is_rounded else None
        self._grad_scale = torch.ones((), dtype=torch.float32, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def num_updates(self) -> int:
        """Updates so far, skipped steps left out. Waits for the device."""
        return int(self._num_updates)

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        """Set the count: the correction of both moments' bias follows from it."""
        self._num_updates.fill_(value)

    def begin_step(
        self, step: int, grad_norm: Tensor, is_bad: Tensor, loss_scale: Tensor | None = None
    ) -> None:
        """Begin a step whose gradients are scaled to a norm of at most clip_norm, or left out where is_bad.

        grad_norm, of all gradients together, and is_bad (bool) are scalars on the device and are not read by
        the host unless the masters lie there. The gradients that come are loss_scale times too large.
        """
        limit = torch.inf if self._clip_norm is None else self._clip_norm
        divisor = torch.clamp(grad_norm / limit, min=1.0)
        if loss_scale is not None:
            divisor = divisor * loss_scale
        device = self._num_updates.device
        self._grad_scale = torch.where(is_bad, 1.0, divisor).to(device)
        self._found_inf = is_bad.float().to(device)
        self._num_updates += 1.0 - self._found_inf
        self._step = step
        if self._compiled is not None:
            self._compiled.begin_step(self.lr, self._weight_decay, self._num_updates)

    def values(self) -> list[dict[str, Any]]:
        """Return what else belongs to the state: nothing."""
        return []

    def restored(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state that was filled."""

    @torch.no_grad()
    def update(
        self, trained: Sequence[Trained], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        """Update some masters with their gradients, and round them into the memory of their parameters.

        Gradients and parameters have the masters' shapes and device and each a dtype of its own; a parameter
        of the masters' dtype is the master's own memory. Gradients are overwritten. Each master once in a
        step; one without elements is left out.
        """
        groups: dict[tuple[bool, float], list[_Piece]] = {}
        for item, gradient, parameter in zip(trained, gradients, parameters, strict=True):
            if gradient.numel():
                flat = item.master.view(-1), gradient.reshape(-1), parameter.view(-1), self._of(item)
                key = item.parameter.dim() >= 2, self._rates.get(item.name, 1.0)
                groups.setdefault(key, []).append(_Piece(item, 0, *flat))
        for (has_decay, rate), pieces in groups.items():
            # Vectors are few and short: one call for all of them is less than one each.
            chosen = [piece for piece in pieces if not (has_decay and self._update_compiled(piece, rate))]
            if chosen:
                decay = self._weight_decay / rate if has_decay else 0.0
                self._update_in_blocks(chosen, self.lr * rate, decay)

    def _of(self, item: Trained) -> tuple[Tensor, Tensor]:
        first, second = item.moments or (self.state[item.master][name] for name in MOMENTS)
        return first.view(-1), second.view(-1)

    def _update_compiled(self, piece: _Piece, rate: float) -> bool:
        """Update a matrix by the compiled pass; return False where that is not for it."""
        if self._compiled is None or not piece.is_converted or piece.master.numel() % ROW:
            return False
        state = (piece.master, *piece.moments)
        given = piece.gradient, piece.parameter
        self._compiled.update(state, *given, self._grad_scale, self._found_inf, rate)
        return True

    def _update_in_blocks(self, chosen: Sequence[_Piece], lr: float, weight_decay: float) -> None:
        """Update some masters by blocks of a size whose fp32 copies stay in the cache: what is converted for
        the kernel, or rounded after it, goes through memory once.
        """
        length = _block_length(chosen[0].master)
        wide = _Wide(min(length, sum(_rounded_up(piece.master.numel()) for piece in chosen)))
        for block in _blocks(chosen, length) if any(piece.is_converted for piece in chosen) else [chosen]:
            moments = [[piece.moments[number] for piece in block] for number in range(len(MOMENTS))]
            wide_moments = [wide.copies(moment, number) for number, moment in enumerate(moments)]
            masters = [piece.master for piece in block]
            gradients = wide.copies([piece.gradient for piece in block], len(MOMENTS))
            self._update(masters, gradients, wide_moments, lr, weight_decay)
            if self._is_rounded:
                self._round_moments(block, wide_moments)
            if block[0].parameter.dtype is not masters[0].dtype:
                torch._foreach_copy_([piece.parameter for piece in block], masters)

    def _update(
        self,
        masters: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        first, second = moments
        torch._fused_adamw_(
            masters,
            gradients,
            first,
            second,
            [],
            [self._num_updates] * len(masters),
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self._grad_scale,
            found_inf=self._found_inf,
        )

    def _round_moments(self, block: Sequence[_Piece], wide_moments: Sequence[Sequence[Tensor]]) -> None:
        for place, piece in enumerate(block):
            key = random_key("rounding", self._seed, self._step, piece.item.name)
            first = piece.item.start + piece.begin
            index = self._global_index(piece.item, first, first + piece.master.numel())
            bits = mixed_bits(index, key, rounds=1)
            for number, moment in enumerate(piece.moments):
                round_stochastically_(moment, wide_moments[number][place], bits, number)


@dataclass(frozen=True)
class _Piece:
    """Some elements of a master, from `begin` on, and what belongs to them; flat and of one length."""

    item: Trained
    begin: int
    master: Tensor
    gradient: Tensor
    parameter: Tensor
    moments: tuple[Tensor, Tensor]

    @property
    def is_converted(self) -> bool:
        """Whether anything has another dtype than the master."""
        dtypes = {self.gradient.dtype, self.parameter.dtype, self.moments[0].dtype}
        return dtypes != {self.master.dtype}

    def cut(self, begin: int, end: int) -> _Piece:
        """Return a part of the piece, counted from its own begin."""
        tensors = (self.master, self.gradient, self.parameter, *self.moments)
        master, gradient, parameter, *moments = (tensor[begin:end] for tensor in tensors)
        return _Piece(self.item, self.begin + begin, master, gradient, parameter, (moments[0], moments[1]))


def _block_length(master: Tensor) -> int:
    # A dry run on the CPU takes large steps too: it is about a GPU, or has too many of the small ones.
    if master.is_cuda or is_fake(master):
        return ROUNDED_GPU
    return ROUNDED_CPU * torch.get_num_threads()


def _rounded_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _blocks(pieces: Sequence[_Piece], length: int) -> Iterator[list[_Piece]]:
    """Yield the pieces, cut and put together so that each block has at most `length` elements, gaps counted.

    Cuts are at multiples of the alignment: the kernel treats each element as it would in one call.
    """
    block: list[_Piece] = []
    used = 0
    for piece in pieces:
        begin, size = 0, piece.master.numel()
        while begin < size:
            end = min(size, begin + length - used)
            block.append(piece.cut(begin, end))
            used, begin = used + _rounded_up(end - begin), end
            if used == length:
                yield block
                block, used = [], 0
    if block:
        yield block


class _Wide:
    """Memory for fp32 copies of one block's tensors, filled again for each block."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._memory: dict[int, Tensor] = {}

    def copies(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        """Return the tensors in fp32: themselves where they are, else copies that hold until the next call of
        the same `number`.
        """
        if tensors[0].dtype is torch.float32:
            return tensors
        if number not in self._memory:
            self._memory[number] = tensors[0].new_empty(self._length, dtype=torch.float32)
        begins = [0, *itertools.accumulate(_rounded_up(tensor.numel()) for tensor in tensors)]
        memory = self._memory[number]
        copies = [memory[at : at + tensor.numel()] for at, tensor in zip(begins, tensors, strict=False)]
        torch._foreach_copy_(copies, tensors)
        return copies


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all gradients, which may be none, as an fp64 scalar.

    On CPU by fp32 dot products of a limited length: as fast as torch's norm, which sums a million squares
    with an error of 1e-5 (1e-7 so); of 16-bit numbers three times as fast as its norm in fp64.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    if gradients[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
        return norms.double().square().sum()
    flat = [gradient.view(-1) for gradient in gradients]
    if is_fake(flat[0]):
        return torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64)).square().sum()
    return torch.stack(_squares(flat)).double().sum()


def _squares(flat: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of the squares of all pieces, in fp32."""
    is_wide = flat[0].dtype is torch.float32
    length = _DOT_LENGTH if is_wide else _DOT_LENGTH_OF_16_BITS
    pieces = (piece for part in flat for piece in torch.split(part, length))
    if is_wide:
        return [torch.dot(piece, piece) for piece in pieces]
    memory, squares = flat[0].new_empty(length, dtype=torch.float32), []
    for piece in pieces:
        wide = memory[: piece.numel()].copy_(piece)
        squares.append(torch.dot(wide, wide))
    return squares
