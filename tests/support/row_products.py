"""Products in fp8 with a scale for each row, on the CPU: torch 2.13 has them, 2.11 only on GPUs.

fp8 trains on GPUs alone; tests of its arithmetic, and of layouts with it, take the CPU's products.
"""

from __future__ import annotations

import pytest
import torch

from conf.schema import Scaling


def has_row_products() -> bool:
    """Whether this torch multiplies such matrices on the CPU."""
    ones, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(ones, ones.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


NEEDS_ROW_PRODUCTS = pytest.mark.skipif(
    not has_row_products(),
    reason=f"torch {torch.__version__} has fp8 products with scales of rows on GPUs only (2.13: on CPUs too)",
)
BY_ROW = pytest.param(Scaling.row, marks=NEEDS_ROW_PRODUCTS)
EACH_SCALING = (Scaling.tensor, BY_ROW)
