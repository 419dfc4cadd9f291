"""Inductor's cut of a graph into a forward and a backward pass, without the code that it then generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor.compile_fx import compile_fx


def cut_and_run(
    graph: fx.GraphModule, inputs: Any, see: Callable[[fx.GraphModule], None] | None = None
) -> Any:
    """Be a backend of torch.compile that runs both passes as they are; `see` is shown each of them."""

    def run(part: fx.GraphModule, *_: object, **__: object) -> Any:
        if see is not None:
            see(part)
        return make_boxed_func(part.forward)

    return compile_fx(graph, inputs, inner_compile=run)
