"""Counts the bytes of tensors that are alive while operators run, also of fake tensors, which have none.

It sees operators and what they return, so what a library takes for itself is not counted. It knows no model.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `now` what operators have made since it was entered and nobody has let go of; in `most` its
    peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        before = {_key(it) for it in tree_leaves((arguments, options)) if isinstance(it, Tensor)}
        made = operator(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _key(tensor) not in before:
                self._see(tensor)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._lose, key, size)

    def _lose(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
