"""What a torch may lack that the packages do without, asked of the one that is here: for tests that need it.

Products in fp8 with a scale for each row, on the CPU: fp8 trains on GPUs alone, but tests of its arithmetic,
and of layouts with it, take the CPU's products. And a policy of recomputation that is told what an operator
made (`orchestra.parallel.blocks`).
"""

from __future__ import annotations

import pytest
import torch

from conf.schema import Scaling
from orchestra.parallel.blocks import TELLS_OUTPUTS


def has_row_products() -> bool:
    """Whether this torch multiplies fp8 matrices with scales of rows on the CPU."""
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
EACH_SCALING = (Scaling.tensor, pytest.param(Scaling.row, marks=NEEDS_ROW_PRODUCTS))
NEEDS_OUTPUTS = pytest.mark.skipif(
    not TELLS_OUTPUTS,
    reason=f"torch {torch.__version__}: train.recompute=selective of mixtures with parallelism.tp is refused",
)
