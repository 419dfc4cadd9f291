"""Rounding against torch's own, over all kinds of bit patterns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from orchestra.huggingface.export import converted, stored

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Zeros, infinities, NaNs that signal or would carry over, the largest numbers, ties both ways, denormals.
SPECIAL = (
    *(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x00018000, 1),
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33800000, 0x38801000),
)


def singles() -> npt.NDArray[np.uint32]:
    random = np.random.default_rng(5).integers(0, 1 << 32, size=300_000, dtype=np.uint32)
    return np.concatenate([np.array(SPECIAL, dtype=np.uint32), random])


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("source", ["F32", "BF16", "F16"])
def test_every_pattern_is_rounded_as_torch_rounds_it(source: str, target: str) -> None:
    bits = singles().astype(np.uint32 if source == "F32" else np.uint16)
    expected = torch.frombuffer(bytearray(bits.tobytes()), dtype=TORCH[source]).to(TORCH[target])
    ours, _ = converted(stored(bits.tobytes(), source), source, target)
    found = torch.frombuffer(bytearray(ours.tobytes()), dtype=TORCH[target])
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    integer = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(found.view(integer)[~is_nan], expected.view(integer)[~is_nan])


def test_only_finite_numbers_that_became_infinite_are_counted() -> None:
    numbers = np.array([1.0, 65504.0, 65519.9, 65520.0, -1e30, np.inf, np.nan, 3.4e38], dtype="<f4")
    assert converted(numbers, "F32", "F16")[1] == 3
    assert converted(numbers, "F32", "BF16")[1] == 1
    assert converted(numbers, "F32", "F32")[1] == 0
