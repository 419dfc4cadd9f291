"""What gives gradients to their memory, in the forms that a GPU gets, on the CPU."""

from __future__ import annotations

import pytest
import torch

from orchestra.model import kernels
from orchestra.model.weight_gradients import add_row_sums_

TOKENS, ROWS, WIDTH = 64, 9, 8


@pytest.mark.parametrize("num_different", [1, 3, ROWS])
@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32])
def test_sums_for_a_gpu_are_added_to_the_rows_that_were_looked_up(
    kept_in: torch.dtype, num_different: int
) -> None:
    generator = torch.Generator().manual_seed(num_different)
    # The last rows too: the first one has no place of its own.
    rows = ROWS - 1 - torch.randint(0, num_different, (TOKENS,), generator=generator)
    grads = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    before = torch.randn(ROWS, WIDTH, generator=generator).to(kept_in)
    exact = before.double().index_add(0, rows, grads.double())
    memory = before.clone()
    add_row_sums_(memory, rows, grads, on_gpu=True)
    # Sum and total are rounded once each where the memory has 16 bits.
    tolerance = 2**-7 if kept_in is torch.bfloat16 else 1e-6
    torch.testing.assert_close(memory.double(), exact, rtol=tolerance, atol=8 * tolerance)
    on_cpu = before.clone()
    add_row_sums_(on_cpu, rows, grads, on_gpu=False)
    torch.testing.assert_close(memory, on_cpu, rtol=tolerance, atol=8 * tolerance)
    untouched = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, rows, value=False)
    assert torch.equal(memory[untouched], before[untouched])


def test_no_tokens_add_nothing() -> None:
    memory = torch.ones(ROWS, WIDTH)
    add_row_sums_(memory, torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH), on_gpu=True)
    assert torch.equal(memory, torch.ones(ROWS, WIDTH))


def test_a_product_is_added_in_compiled_code_as_it_is_in_eager_code() -> None:
    into, left, right = torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)
    expected = into + left @ right

    def added(into: torch.Tensor) -> torch.Tensor:
        into = into.clone()
        kernels._add_product_to(into, left, right)
        return into * 1.0

    torch.testing.assert_close(torch.compile(added, backend="aot_eager")(into), expected)
    torch.library.opcheck(torch.ops.orchestra.add_product_to.default, (into, left, right))
