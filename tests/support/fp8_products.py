"""Products in fp8 on the CPU by its fp32 products, in place of torch's own there once `register` was called.

Torch's are loops without blocks: of two matrices of 128² they take 160 ms, these a thousandth, and they took
nearly all the time of tests that train in fp8. fp8 trains on GPUs alone: what such tests look at is what
becomes of the operator's results, which are torch's (`test_fp8.py`). Torch 2.11 has none with scales of rows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_registered: list[torch.library.Library] = []


def register() -> None:
    """Take these products in this process from now on."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That there is one already.
        warnings.simplefilter("ignore")
        library.impl("_scaled_mm", _product, "CPU")
        library.impl("_scaled_mm.out", _product_into, "CPU")
    _registered.append(library)


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """Take torch's products here."""
    _registered.pop()._destroy()
    yield
    register()


def _product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Return left [M, K] · right [K, N], each number times its scale: one, or of rows [M, 1] and [1, N]."""
    assert bias is scale_result is None
    product = left.float() @ right.float()
    return product.mul_(left_scale).mul_(right_scale).to(out_dtype or left.dtype)


def _product_into(*arguments: Any, out: Tensor, **named: Any) -> Tensor:
    return out.copy_(_product(*arguments, **named))
