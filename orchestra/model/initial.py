"""Initial values as a pure function of (seed, parameter name, global index).

Any slice of any parameter can be made on any rank without the rest, so every layout starts from the same
bits, and a layout never needs a "seed checkpoint". It knows no mesh: a shard is given by its global offsets.

Method: a counter-based generator. The 64-bit counter (global flat index) is mixed with a key from SHA-256 of
(seed, name) by two rounds of the splitmix64 finaliser; the upper and lower 32 bits give two uniforms, and the
Box-Muller cosine branch gives one normal number. The integer part is exact everywhere; the float part runs on
the CPU in fp64 and is rounded to fp32 once, so the bits do not depend on the device or the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Elements made at a time: bounds the fp64 scratch memory at a few tens of MB.
_BLOCK = 1 << 20


def parameter_key(seed: int, name: str) -> int:
    """Return the 64-bit key of one parameter's random stream."""
    digest = hashlib.sha256(f"{seed}\x00{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _mixed(counter: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finaliser, twice, with the key in between (Steele, Lea and Flood, OOPSLA 2014)."""
    value = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for _ in range(2):
        value ^= value >> np.uint64(30)
        value *= np.uint64(0xBF58476D1CE4E5B9)
        value ^= value >> np.uint64(27)
        value *= np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
        value += np.uint64(key)
    return value


def standard_normal(flat_index: np.ndarray, key: int) -> np.ndarray:
    """Return fp32 normal numbers for uint64 global flat indices; the same index always gives the same
    bits.
    """
    bits = _mixed(flat_index.astype(np.uint64), key)
    radius_uniform = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle_uniform = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    normal = np.sqrt(-2.0 * np.log(radius_uniform)) * np.cos(2.0 * math.pi * angle_uniform)
    return normal.astype(np.float32)


def normal_slice(
    key: int, global_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int], std: float
) -> Tensor:
    """Return the fp32 slice [offsets, offsets + shape) of a normal tensor of `global_shape` (CPU)."""
    out = np.empty(math.prod(shape), dtype=np.float32)
    for start in range(0, out.size, _BLOCK):
        local = np.arange(start, min(start + _BLOCK, out.size), dtype=np.uint64)
        out[start : start + local.size] = standard_normal(
            _global_flat_index(local, global_shape, offsets, shape), key
        )
    out *= np.float32(std)
    return torch.from_numpy(out.reshape(tuple(shape)))


def _global_flat_index(
    local: np.ndarray, global_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> np.ndarray:
    if tuple(shape) == tuple(global_shape):
        return local
    index = np.zeros_like(local)
    stride = np.uint64(1)
    for size, local_size, offset in reversed(list(zip(global_shape, shape, offsets, strict=True))):
        coordinate = local % np.uint64(local_size)
        local = local // np.uint64(local_size)
        index += (coordinate + np.uint64(offset)) * stride
        stride *= np.uint64(size)
    return index
