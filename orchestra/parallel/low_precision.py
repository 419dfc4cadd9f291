"""Puts products of fp8 in the place of the blocks' own, cut over ranks or not, and says who can compute them.

Only products of the blocks change. What is sensitive stays in 16 bits or more: embedding, output matrix and
loss, norms, the attention between its products, and on request whole blocks at both ends of the model.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from conf.schema import Config, PrecisionName
from orchestra.errors import TrainingError
from orchestra.model.layers import Attention, GeluMLP, SwiGLU
from orchestra.model.transformer import Transformer
from orchestra.parallel.tensor.parallel_layers import ColumnsProduct, RowsProducts
from orchestra.precision.fp8 import LEAST_CAPABILITY, Fp8Products


def set_products(model: Transformer, config: Config) -> None:
    """Let the blocks compute in fp8 where the configuration says so. *Any rank*, after the cutting of
    tensors.
    """
    precision = config.precision
    if precision.name is not PrecisionName.fp8:
        return
    products = Fp8Products(precision.fp8_scaling)
    num_kept = precision.fp8_bf16_blocks
    for block in list(model.layers)[num_kept : len(model.layers) - num_kept]:
        for module in block.modules():
            _set(module, products)


def _set(module: nn.Module, products: Fp8Products) -> None:
    if not isinstance(module, Attention | SwiGLU | GeluMLP):
        return
    entering = module.products
    module.products = (
        RowsProducts(entering.group, products) if isinstance(entering, RowsProducts) else products
    )
    leaving = module.o_proj if isinstance(module, Attention) else module.down_proj
    if isinstance(leaving, ColumnsProduct):
        leaving.product = products.linear
    else:
        leaving.forward = functools.partial(_through, leaving, products)  # type: ignore[method-assign]


def _through(linear: nn.Linear, products: Fp8Products, x: torch.Tensor) -> torch.Tensor:
    return products.linear(x, linear.weight, linear.bias)


def refuse_missing_hardware(config: Config, device: torch.device) -> None:
    """Raise TrainingError where this rank's device has no fast products in the configured precision."""
    if config.precision.name is not PrecisionName.fp8:
        return
    needed = ".".join(map(str, LEAST_CAPABILITY))
    if device.type != "cuda":
        found = "this rank trains on the CPU"
    elif torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found = f"{torch.cuda.get_device_name(device)} has {capability}"
    else:
        return
    raise TrainingError(
        f"precision=fp8 needs a GPU of compute capability {needed} or more (Ada, Hopper, Blackwell), and "
        f"{found}; use precision=bf16"
    )
