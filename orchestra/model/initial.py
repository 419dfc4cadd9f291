"""Initial values as a pure function of (seed, parameter name, global index), the same bits on every machine.

Any slice of any parameter can be made on any rank without the rest, so every layout starts from the same
bits, and no layout needs a "seed checkpoint". A shard is given by its global offsets.

Method: a counter-based generator. The global flat index is mixed with a key from SHA-256 of (seed, name) by
splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), applied twice. The upper and lower 32 bits give
two uniform numbers, and the Box-Muller cosine branch makes one normal number of them. Its logarithm and
cosine are series in fp64 that use nothing but +, −, ×, ÷ and sqrt, which IEEE 754 rounds in one way
everywhere: the bits depend neither on the device, the vector unit and the number of threads, nor on the
mathematical library.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

# Elements made at a time. On CPU the fp64 scratch of a block stays in the cache (twice as fast as 2²⁰ here).
_BLOCK_CPU = 1 << 17
_BLOCK_GPU = 1 << 24
# Slices of at most so many elements are made together: a hundred calls of operators cost more than they do.
_FEW = 1 << 12
# log: 2·atanh series, |r| ≤ 0.172; sin: Taylor series, |x| ≤ π/2. Both err by less than 1e-11, fp32 rounds at
# 6e-8.
_LOG_TERMS = 7
_SIN_TERMS = 8


def random_key(*parts: int | str) -> int:
    """Return the signed 64-bit key of a random stream, such as that of a seed and a parameter's name."""
    digest = hashlib.sha256("\x00".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def mixed_bits(index: Tensor, key: int | Tensor, rounds: int = 2) -> Tensor:
    """Return 64 mixed bits (as int64, products modulo 2⁶⁴) for each index.

    One round of the finaliser is enough for bits whose sums alone matter.
    """
    value = index * _signed(0x9E3779B97F4A7C15) + key
    for _ in range(rounds):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ _shifted(value, shift)) * _signed(factor)
        value = (value ^ _shifted(value, 31)) + key
    return value


def _shifted(value: Tensor, places: int) -> Tensor:
    """Shift right without copying the sign."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def _log(value: Tensor) -> Tensor:
    """Return the natural logarithm of positive fp64 numbers by exactly rounded operations."""
    mantissa, exponent = torch.frexp(value)  # mantissa in [1/2, 1)
    is_low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(square, 1.0 / (2 * _LOG_TERMS - 1))
    for term in range(_LOG_TERMS - 2, -1, -1):
        series.mul_(square).add_(1.0 / (2 * term + 1))
    whole = (exponent - is_low.to(exponent.dtype)).to(torch.float64) * math.log(2.0)
    return whole + series.mul_(ratio).mul_(2.0)


def _cos_of_turns(turns: Tensor) -> Tensor:
    """Return cos(2π·turns) for fp64 turns in [0, 1) by exactly rounded operations."""
    # cos(2πt) = sin(2π(1/4 − |t'|)) with t' the turns from −1/2 to 1/2.
    angle = (0.25 - (0.5 - (turns - 0.5).abs()).abs()) * (2.0 * math.pi)
    square = angle * angle
    series = torch.full_like(square, _sin_coefficient(_SIN_TERMS - 1))
    for term in range(_SIN_TERMS - 2, -1, -1):
        series.mul_(square).add_(_sin_coefficient(term))
    return series.mul_(angle)


def _sin_coefficient(term: int) -> float:
    return (-1.0) ** term / math.factorial(2 * term + 1)


def standard_normal(index: Tensor, key: int | Tensor) -> Tensor:
    """Return fp32 normal numbers for int64 global flat indices, with one key or one for each; the same index
    and key always give the same bits.
    """
    bits = mixed_bits(index, key)
    radius_uniform = (_shifted(bits, 32).to(torch.float64) + 0.5) * 2.0**-32
    turns = (bits & 0xFFFFFFFF).to(torch.float64) * 2.0**-32
    radius = (_log(radius_uniform) * -2.0).sqrt_()
    return radius.mul_(_cos_of_turns(turns)).to(torch.float32)


@dataclass(frozen=True)
class NormalSlice:
    """A tensor to fill with its slice, which begins at `offsets`, of a normal tensor of `global_shape`."""

    out: Tensor
    key: int
    global_shape: Sequence[int]
    offsets: Sequence[int]
    std: float
    mean: float = 0.0

    def index(self, start: int, stop: int) -> Tensor:
        """Return where elements `start` to `stop` of the slice lie in the whole tensor."""
        local = torch.arange(start, stop, device=self.out.device)
        return global_flat_index(local, self.global_shape, self.offsets, self.out.shape)

    def scaled(self, values: Tensor) -> Tensor:
        """Return standard normal numbers with the slice's deviation and mean."""
        return values * self.std + self.mean if self.mean else values * self.std


def fill_normal_slices_(slices: Sequence[NormalSlice]) -> None:
    """Fill slices on one device, of any dtype: values are made in fp32 and rounded last."""
    few = [part for part in slices if part.out.numel() <= _FEW]
    for part in slices:
        if part.out.numel() > _FEW:
            _fill_in_blocks(part)
    if few:
        _fill_together(few)


def _fill_in_blocks(part: NormalSlice) -> None:
    dense = part.out.contiguous()
    flat = dense.view(-1)
    block = _BLOCK_GPU if flat.is_cuda else _BLOCK_CPU
    for start in range(0, flat.numel(), block):
        index = part.index(start, min(start + block, flat.numel()))
        flat[start : start + block].copy_(part.scaled(standard_normal(index, part.key)))
    if dense is not part.out:
        part.out.copy_(dense)


def _fill_together(parts: Sequence[NormalSlice]) -> None:
    sizes = [part.out.numel() for part in parts]
    index = torch.cat([part.index(0, size) for part, size in zip(parts, sizes, strict=True)])
    keys = torch.tensor([part.key for part in parts], device=index.device)
    repeats = torch.tensor(sizes, device=index.device)
    values = standard_normal(index, keys.repeat_interleave(repeats, output_size=len(index)))
    for part, own in zip(parts, torch.split(values, sizes), strict=True):
        part.out.copy_(part.scaled(own).view(part.out.shape))


def global_flat_index(
    local: Tensor, global_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Return where elements of a slice of `shape`, which begins at `offsets`, lie in the whole tensor; all
    indices are flat ones (int64).
    """
    if tuple(shape) == tuple(global_shape):
        return local
    index = torch.zeros_like(local)
    stride = 1
    for size, local_size, offset in reversed(list(zip(global_shape, shape, offsets, strict=True))):
        index += (local % local_size + offset) * stride
        local = local // local_size
        stride *= size
    return index


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no values: that of a dry run (torch's FakeTensorMode)."""
    return isinstance(tensor, FakeTensor)


class NoTorchInit(TorchFunctionMode):
    """Lets torch's layers leave their parameters as they are, for models whose values come later.

    On the meta device torch would take its random functions apart to say what shape comes of them, by its
    compiler, whose import takes a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


_fakes_are_on_gpu = False


@contextmanager
def fakes_on_gpu(*, is_wanted: bool) -> Iterator[None]:
    """Let fake tensors, which have no GPU, go through the kernels that one takes."""
    global _fakes_are_on_gpu
    before, _fakes_are_on_gpu = _fakes_are_on_gpu, is_wanted
    try:
        yield
    finally:
        _fakes_are_on_gpu = before


def takes_gpu_kernels(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU, or a fake one that stands for one there (`fakes_on_gpu`)."""
    return tensor.is_cuda or (_fakes_are_on_gpu and is_fake(tensor))
