"""Nothing that a run reads is unpickled: a pickle runs whatever its writer wants.

One module reads checkpoints of torch.distributed.checkpoint, with an allow-list, in a process of its own.
"""

from __future__ import annotations

import ast

import pytest
from source_tree import modules, reached, trail

# The only exceptions, and what they use of pickle: an unpickler that makes nothing and weights_only=True; and
# for dumps of NCCL's watchdog an unpickler that makes plain values only (unit/recovery proves it).
READS_DCP = "checkpointing.dcp.dcp_folder"
ALLOWED = {READS_DCP: ["pickle", "load"], "orchestra.recovery.collectives": ["pickle"]}
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


def test_one_module_unpickles_and_no_other() -> None:
    found = {name: found_in(module.path.read_text()) for name, module in modules().items()}
    assert {name: names for name, names in found.items() if names} == ALLOWED
    calls = [
        node
        for node in ast.walk(modules()[READS_DCP].tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert ["weights_only=True" in ast.unparse(call) for call in calls] == [True]


def test_no_run_and_no_restore_imports_that_module() -> None:
    """Nobody does but the process that reads DCP's checkpoints, which nobody imports."""
    package = READS_DCP.rpartition(".")[0]
    others = [name for name in modules() if not f"{name}.".startswith(f"{package}.")]
    importer = reached(*others)
    assert "checkpointing.restore" in importer
    assert [trail(importer, name) for name in importer if f"{name}.".startswith(f"{package}.")] == []


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
