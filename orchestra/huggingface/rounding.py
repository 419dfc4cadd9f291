"""fp32, bf16 and fp16 numbers from one type to another, rounded to nearest, ties to even.

numpy has no bfloat16: here it is 16 bits in a uint16. It knows no files and no tensors' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkpointing.format.checksums import Buffer

Numbers: TypeAlias = npt.NDArray[Any]

# How each type lies in memory, little-endian as safetensors wants it.
STORED: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Our short names (conf.schema.DType) and safetensors' own.
SAFETENSORS_NAMES: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_QUIET_NAN_BIT = 0x0040
# Small enough for the cache: what is computed in between then costs neither time nor memory.
_NUMBERS_AT_ONCE = 1 << 16


def stored(content: Buffer, dtype: str) -> Numbers:
    """Return the numbers that `content` holds, flat and as they are stored (a view)."""
    return np.frombuffer(content, dtype=STORED[dtype])


def converted(numbers: Numbers, source: str, target: str) -> tuple[Numbers, int]:
    """Return stored numbers of type `source` as type `target`, and how many finite ones became infinite.

    Infinities and NaNs stay what they are; what is beyond the range of `target` becomes an infinity.
    """
    if source == target:
        return numbers, 0
    result: Numbers = np.empty(numbers.shape, dtype=STORED[target])
    num_overflowed = 0
    for first in range(0, len(numbers), _NUMBERS_AT_ONCE):
        part = slice(first, first + _NUMBERS_AT_ONCE)
        wide: Numbers = _widened(numbers[part]) if source == "BF16" else numbers[part]
        result[part] = _narrowed(wide, target)
        num_overflowed += _num_overflowed(wide, result[part], target)
    return result, num_overflowed


def _narrowed(wide: Numbers, target: str) -> Numbers:
    if target == "BF16":
        return _as_bfloat16(wide.astype("<f4", copy=False))
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.astype(STORED[target])


def _num_overflowed(wide: Numbers, result: Numbers, target: str) -> int:
    is_infinite = np.isinf(_widened(result) if target == "BF16" else result)
    return int(np.count_nonzero(is_infinite & ~np.isinf(wide))) if is_infinite.any() else 0


def _widened(bits: Numbers) -> Numbers:
    return (bits.astype("<u4") << 16).view("<f4")


def _as_bfloat16(singles: Numbers) -> Numbers:
    """Round fp32 to its upper half: add just under half a unit, or half where the last bit kept is odd."""
    bits = singles.view("<u4")
    upper = bits >> 16
    rounded: Numbers = ((bits + (upper & 1) + 0x7FFF) >> 16).astype("<u2")
    # The addition would carry a NaN into infinity or zero.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if is_nan.any():
        rounded[is_nan] = upper[is_nan] | _QUIET_NAN_BIT
    return rounded
