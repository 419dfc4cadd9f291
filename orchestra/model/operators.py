"""Operators that change a tensor, for compiled code: the compiler keeps their calls, in their order, and does
not look inside.

torch's `custom_op` does the same with layers for autograd around each call, in Python: 29 (torch 2.11) and 48
microseconds (2.13) a call on a CPU's host, where these take 5. Nobody differentiates these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("orchestra", "FRAGMENT")  # type: ignore[no-untyped-call]


def changing(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes the operator `orchestra::<name>` of a function, for any device.

    It returns nothing and changes the tensor that is its first argument.
    """

    def operator_of(function: Callable[..., None]) -> Callable[..., None]:
        changed = next(iter(function.__annotations__))
        schema = torch.library.infer_schema(function, mutates_args=(changed,))
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        # Nothing that a compiler can see comes of it but the change.
        torch.library.register_fake(f"orchestra::{name}", lambda *_: None, lib=_LIBRARY)
        operator: Callable[..., None] = getattr(torch.ops.orchestra, name).default
        return operator

    return operator_of
