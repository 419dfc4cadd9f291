"""The control plane answers fast because it loads little: checked in a real interpreter, module by module."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from source_tree import ROOT, modules
from test_arrows import WITHOUT_TORCH, part

HEAVY = ("torch", "wandb", "transformers")
# What help does not need; a verb's own help may load what its module reads configurations with.
SLOW_TO_IMPORT = (*HEAVY, "hydra", "rich", "numpy", "pyarrow", "submitit")

# The modules of checkpointing that hold tensors; all others serve commands too.
HOLDING_TENSORS = ("shards", "peers", "save", "staging", "restore", "transfer", "checkpointer")
HOLDING_TENSORS += ("torch_state", "dcp")

REPORT = "; print(*sorted({name.split('.')[0] for name in sys.modules}))"


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after running `code`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import sys; {code}{REPORT}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_whole_control_plane_loads_nothing_heavy() -> None:
    names = [
        name
        for name in modules()
        if name.startswith("orchestra.") and part(name) in WITHOUT_TORCH and part(name) != "__main__"
    ]
    assert names
    assert not loaded_by(f"import {', '.join(names)}") & set(HEAVY)


@pytest.mark.parametrize("arguments", ["--help", "--version", "status --help", "run --help"])
def test_help_loads_no_slow_library(arguments: str) -> None:
    code = f"from orchestra.cli import main; main({arguments.split()!r})"
    assert not loaded_by(code) & set(SLOW_TO_IMPORT)


def test_a_plan_loads_no_numpy() -> None:
    code = "from orchestra.cli import main; main(['plan', 'model=llama_1b', 'cluster=slurm'])"
    assert not loaded_by(code) & {*HEAVY, "numpy", "matplotlib"}


def test_checkpointing_without_tensors_loads_no_torch() -> None:
    names = [
        name
        for name in modules()
        if name.split(".")[0] == "checkpointing" and not {*name.split(".")} & {*HOLDING_TENSORS}
    ]
    assert "checkpointing.verify" in names
    assert not loaded_by(f"import {', '.join(names)}") & set(HEAVY)
