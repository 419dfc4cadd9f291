"""Keeps calls out of compiled code, and torch's compiler out of processes that compile nothing."""

from __future__ import annotations

import torch


def leave_uncompiled(kind: type) -> None:
    """Let no compiler look into calls of objects of a class. *For its constructor.*

    `torch.compiler.disable` imports the compiler, which takes a second: as a decorator it would do so in
    every process that imports the class, and here only where there are objects.
    """
    call = kind.__call__
    if not getattr(call, "_torchdynamo_disable", False):
        kind.__call__ = torch.compiler.disable(call)  # type: ignore[method-assign,no-untyped-call]
