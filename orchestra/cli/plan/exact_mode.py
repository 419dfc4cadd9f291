"""`orchestra plan --exact [overrides]`: the closed forms beside a count of the real modules' tensors.

The count is made by a process of the data plane (`python -m orchestra.train.dry_build --exact`), which builds
one rank with fake tensors and counts two steps of it; this side composes the configuration, starts it and
compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from orchestra.cli.plan import Mode, configuration, print_result
from orchestra.config.plugin_facts import import_path
from orchestra.errors import EXIT_DONE, EXIT_USAGE, ConfigError, OrchestraError
from orchestra.plan.assemble import shape_of
from orchestra.plan.frameworks import OWN
from orchestra.run.config_file import write_config
from orchestra.sizes.memory.rank_memory import rank_bytes
from orchestra.sizes.training_shape import TrainingShape
from orchestra.sizes.units import MIB

_EXPLAINED = """\
--exact counts one rank's tensors too: the modules, optimizer and collectives that would train are built with
fake tensors (no memory, no GPU, no other ranks) for two steps, with the recomputation that is asked for.
Both counts are shown by component, and how far the closed form is off. It takes some seconds and loads torch.
"""

# Closed form's component and how the count calls it; activations and logits are alive at the same time.
_TITLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "masters": "master weights",
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "first_step": "first step, at its most",
    "later_steps": "later steps, at their most",
    "peak": "peak of tensors",
    "host": "host memory of the state",
    "disk": "disk of the state",
}


@dataclass(frozen=True)
class Compared:
    """One component in bytes, by the closed form and counted."""

    name: str
    closed: float
    counted: int

    @property
    def difference(self) -> float | None:
        """How far the closed form is from the count, as a share of the count; None where nothing is."""
        return self.closed / self.counted - 1 if self.counted else None


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--exact", action="store_true", help="count the tensors of the real modules too")


def _run(arguments: Namespace) -> int:
    """Print both counts and return 0. Raises ConfigError for other frameworks."""
    if arguments.framework not in (None, OWN):
        raise ConfigError(
            f"--exact counts orchestra's own modules, and there are none of {arguments.framework} here; "
            "leave --framework out, or --exact"
        )
    config = configuration(arguments.overrides)
    shape = shape_of(config)
    compared = _compare(shape, _counted(config, shape))
    keeps_less = bool(shape.layers_in_fp8) and shape.options.is_compiled
    print_result(
        arguments, lambda: _facts(compared), lambda: comparison_lines(compared, keeps_less=keeps_less)
    )
    return EXIT_DONE


MODE = Mode("exact", _EXPLAINED, _add_arguments, _run)


def _counted(config: Config, shape: TrainingShape) -> Mapping[str, int]:
    """Start the process that counts, on rank 0's place, and return its answer in bytes."""
    is_gpu = ["--as-gpu"] if shape.options.is_gpu else []
    environment = {**os.environ, "PYTHONPATH": import_path(config), "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        write_config(file, config)
        command = [sys.executable, "-m", "orchestra.train.dry_build", str(file), "--exact"]
        command += ["--world-size", str(shape.layout.world_size), *is_gpu]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == EXIT_USAGE:
        raise ConfigError([line.removeprefix("error: ") for line in done.stderr.splitlines()])
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OrchestraError(f"counting the tensors failed: {last[0]}; plan without --exact")
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _compare(shape: TrainingShape, count: Mapping[str, int]) -> list[Compared]:
    """Return the components of a rank, those that neither side has left out."""
    own = rank_bytes(shape, shape.stages[0])
    step = own.step.total
    closed = {
        "parameters": own.parameters,
        "gradients": own.gradients,
        "masters": own.masters,
        "optimizer": own.optimizer,
        "gathered": own.first_buffers,
        "first_step": step + own.growing_buffers * (shape.accumulation > 1),
        "later_steps": step + own.growing_buffers,
        "peak": own.total,
        "host": own.host,
        "disk": own.disk,
    }
    rows = [Compared(name, value, count[f"{name}_bytes"]) for name, value in closed.items()]
    return [row for row in rows if row.closed or row.counted]


def _facts(compared: list[Compared]) -> dict[str, object]:
    """Return the comparison for programs: bytes, and differences as shares of what was counted."""
    return {
        row.name: {
            "closed_form_bytes": round(row.closed),
            "counted_bytes": row.counted,
            "difference": row.difference,
        }
        for row in compared
    }


_NOTE = """\
Counted are tensors, of rank 0's place; the libraries, the allocator's gaps and
the driver come on top. A step's most holds activations, logits, messages and
temporary tensors."""
_NOTE_ON_COMPILED_FP8 = """\
Blocks are counted as they run when they are not compiled: in fp8 compiled ones
keep less, as the closed form knows."""


def comparison_lines(compared: list[Compared], *, keeps_less: bool = False) -> list[str]:
    """Return the comparison as a table; `keeps_less`: the blocks that train keep less than those counted."""
    lines = [f"{'one rank, MiB':<28}{'closed form':>14}{'counted':>14}{'difference':>12}"]
    for row in compared:
        off = "" if row.difference is None else f"{row.difference:+.1%}"
        lines.append(f"{_TITLES[row.name]:<28}{row.closed / MIB:>14,.1f}{row.counted / MIB:>14,.1f}{off:>12}")
    return [*lines, "", _NOTE, *[_NOTE_ON_COMPILED_FP8] * keeps_less]
