"""Products whose tiles and waves are full take what FLOPs say; others take longer, never less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import case

from orchestra.plan.kernels.product_tiles import slowdown, unaligned_slowdown

# What products that fill a device take of the time of usual ones: 780 TFLOP/s and 749.
FULL = 749 / 780


def test_large_products_take_what_their_flops_say() -> None:
    huge = slowdown(case(), [(32768, 33792)], num_tokens=65536)
    assert 1.0 < huge / FULL < 1.02


def test_a_last_wave_that_is_nearly_empty_takes_as_long_as_a_full_one() -> None:
    # 128 x 256: 132 tiles are one wave of 132 processors, of which 131 fill all but one.
    full = slowdown(case(), [(8192, 128 * 132)], num_tokens=256)
    assert slowdown(case(), [(8192, 128 * 131)], num_tokens=256) < 1.02 * full
    assert slowdown(case(), [(8192, 128 * 133)], num_tokens=256) > 1.05 * full


def test_products_are_never_faster_than_full_ones_and_lose_more_the_narrower_they_are() -> None:
    lost = [slowdown(case(), [(width, 4 * width)]) for width in (8192, 2048, 768, 256, 64, 1)]
    assert lost == sorted(lost)
    assert lost[0] > FULL


def test_a_device_with_an_unknown_number_of_processors_is_taken_to_be_full() -> None:
    usual = case()
    unknown = replace(usual, device=replace(usual.device, num_processors=None))
    assert slowdown(unknown, [(100, 100)]) == 1.0


@pytest.mark.parametrize(
    ("num_words", "width_bytes", "longer"),
    [(50257, 2, True), (50304, 2, False), (50264, 2, False), (50264, 1, True)],
)
def test_rows_of_logits_that_are_not_aligned_cost_the_backward_products(
    num_words: int, width_bytes: int, longer: bool
) -> None:
    assert (unaligned_slowdown(num_words, width_bytes) > 1.0) is longer
