"""What gives gradients to their memory on a GPU: sums inside of products, and rows in a fixed order."""

from __future__ import annotations

import pytest
import torch

from orchestra.model.weight_gradients import WeightGradient, add_product_


@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32])
def test_a_product_of_16_bits_is_written_and_added_where_the_gradient_is_kept(kept_in: torch.dtype) -> None:
    left, right = (torch.randn(shape, device="cuda").bfloat16() for shape in ((64, 256), (256, 48)))
    memory = torch.full((64, 48), torch.nan, device="cuda", dtype=kept_in)
    exact = left.double() @ right.double()
    # bf16 keeps 8 digits, and rounds every sum; fp32 has the products' own rounding of sums of 256.
    each = 2**-8 if kept_in is torch.bfloat16 else 1e-5
    for number, adds in enumerate((False, True, True), 1):
        add_product_(memory, left, right, adds=adds)
        off = number * each
        torch.testing.assert_close(memory.double(), number * exact, rtol=off, atol=64 * off)


@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [512, 8192])
def test_rows_that_come_often_are_summed_alike_every_time(kept_in: torch.dtype, num_rows: int) -> None:
    rows = torch.randint(0, 5, (num_rows,), device="cuda")
    grads = torch.randn(num_rows, 32, device="cuda").bfloat16()
    exact = torch.zeros(9, 32, dtype=torch.double).index_add_(0, rows.cpu(), grads.double().cpu())
    found = []
    for _ in range(3):
        memory = torch.full((9, 32), torch.nan, device="cuda", dtype=kept_in)
        taker = WeightGradient(lambda memory=memory: (memory, False), lambda: None)
        taker.add_rows(rows, grads)
        found.append(memory)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    tolerance = 2**-8 if kept_in is torch.bfloat16 else 1e-5
    # fp32 sums of some thousands.
    torch.testing.assert_close(found[0].double().cpu(), exact, rtol=tolerance, atol=1e-3)
