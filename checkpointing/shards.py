"""What a user hands in: the part of a named tensor that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.box import Box
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.plans import TensorPiece

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Shard:
    """The elements of tensor `name` (of `shape` as a whole) from `offsets` on that `tensor` holds.

    Ranks with equal name and offsets hold replicas of each other. A rank may hold several shards of a tensor,
    and empty ones. `tensor` is read on save and written on restore, in place; any strides, any device.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype not in _SAFETENSORS_NAMES:
            raise MismatchError(f"{self.name}: safetensors has no dtype for {self.tensor.dtype}")
        if len(self.offsets) != self.tensor.dim() or not self.box.is_inside(self.shape):
            found = f"offsets {list(self.offsets)} and local shape {list(self.tensor.shape)}"
            raise MismatchError(f"{self.name}: {found} do not lie inside the shape {list(self.shape)}")

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def piece(self) -> TensorPiece:
        """What it is, without the tensor."""
        return TensorPiece(self.name, self.box, self.dtype, tuple(self.shape))

    @property
    def dtype(self) -> str:
        """safetensors' name of the dtype."""
        return _SAFETENSORS_NAMES[self.tensor.dtype]


def whole(name: str, tensor: Tensor) -> Shard:
    """Return the shard of a tensor that this rank holds as a whole."""
    return Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by safetensors' name."""
    return next(dtype for dtype, known in _SAFETENSORS_NAMES.items() if known == name)


def safetensors_dtype(name: str) -> str | None:
    """Return safetensors' name of a dtype by torch's (`float32`), None where it has none."""
    return next((known for dtype, known in _SAFETENSORS_NAMES.items() if str(dtype) == f"torch.{name}"), None)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as a flat uint8 tensor (a view)."""
    if tensor.numel() == 1:
        # With any stride it is contiguous, and such a view wants one of 1.
        tensor = tensor.as_strided((1,), (1,))
    return tensor.reshape(-1).view(torch.uint8)
