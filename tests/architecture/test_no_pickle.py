"""Nothing that the product reads is unpickled: a pickle runs whatever its writer wants."""

from __future__ import annotations

import ast

import pytest
from source_tree import modules

# Dumps of NCCL's watchdog are read with an unpickler that makes plain values only (unit/recovery proves it).
_ALLOWED = {"orchestra.recovery.collectives": ["pickle"]}
_PICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def found_in(source: str) -> list[str]:
    """Return the names in some source that unpickle what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in _PICKLING]
        elif isinstance(node, ast.ImportFrom):
            names = [name.name for name in node.names]
            if (node.module or "").split(".")[0] in _PICKLING:
                found.append(str(node.module))
            found += [name for name in names if _unpickles(name)]
        elif isinstance(node, ast.Attribute):
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if _unpickles(node.attr) or (is_torch and node.attr == "load"):
                found.append(node.attr)
    return found


def _unpickles(name: str) -> bool:
    return name.endswith(("_object", "_object_list")) and name.startswith(
        ("all_gather", "broadcast", "gather", "scatter", "send", "recv")
    )


def test_no_module_unpickles() -> None:
    found = {name: found_in(module.path.read_text()) for name, module in modules().items()}
    assert {name: names for name, names in found.items() if names} == _ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "dist.all_gather_object(out, it)",
        "dist.broadcast_object_list([1])",
        "torch.load(file)",
    ],
)
def test_what_the_test_above_looks_for_is_found(line: str) -> None:
    assert found_in(line)
