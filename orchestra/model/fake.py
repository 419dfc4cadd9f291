"""Tells tensors that have a shape and no values: a dry run's (torch's FakeTensorMode). It makes none."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape, a data type and a device, but no values to look at or to set."""
    return isinstance(tensor, FakeTensor)
