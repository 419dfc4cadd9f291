"""Stochastic rounding of fp32 to bf16: up or down with the probabilities that keep the mean.

A moment that is rounded to nearest stands still as soon as its change of one step is below half of bf16's
last digit (1/256 of it); rounded stochastically it moves by the right amount on average. The random bits are
a function of (seed, step, name, global index) by the generator of the initial values: every layout rounds
alike, a run that goes on from a checkpoint rounds as it would have, and there is no state to save.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from orchestra.model.initial import mixed_bits

# Digits of fp32 that bf16 does not have.
_LOST_BITS = 16
_LOST_MASK = (1 << _LOST_BITS) - 1


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return the signed 64-bit key of one parameter's random bits in one step."""
    digest = hashlib.sha256(f"rounding\x00{seed}\x00{step}\x00{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_bits(index: Tensor, key: int) -> Tensor:
    """Return 64 random bits (as int64) for each int64 global flat index: enough for four roundings."""
    return mixed_bits(index, key, rounds=1)


def round_stochastically_(out: Tensor, values: Tensor, bits: Tensor, number: int = 0) -> None:
    """Fill the bf16 `out` with finite fp32 values of its shape; a number that bf16 holds stays as it is.

    `number`, 0 to 3, says which 16 of the 64 random bits of each element are used.
    """
    lost = ((bits >> (_LOST_BITS * number)) & _LOST_MASK).to(torch.int32)
    # Adding to the lower digits of a finite number carries into the upper ones, whatever its sign.
    carried = (values.contiguous().view(torch.int32) + lost) & ~_LOST_MASK
    out.copy_(carried.view(torch.float32))
