"""Asks a process of the data plane for what takes a checkpoint's model: `orchestra eval` and `generate`.

A command loads no torch: `python -m orchestra.train.inference.use_checkpoint` reads the weights and computes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from checkpointing.catalog import StoredCheckpoint
from orchestra.cli.checkpoint.checkpoint_ls_command import (
    Place,
    chosen_checkpoints,
    explained,
    first_look,
    refuse_untold,
)
from orchestra.config.plugin_facts import import_path
from orchestra.errors import DataError, OrchestraError
from orchestra.report.run_state import name_of
from orchestra.run.record import fallback_place

# The module's own.
_EXIT_DAMAGED = 3
# Of checkpoints that the run removes while they are read.
_TRIES = 3


def ask(place: Place, step: int | None, act: str, request: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Do `act` with the model of a checkpoint: of `step`, else of the newest that proves intact while it is
    read. Return the step and the answer.

    A run that trains may remove what is being read: its newest one is taken then. Raises ConfigError with the
    steps there are, DataError for a damaged checkpoint that was asked for, and OrchestraError with the words
    of the process.
    """
    for left in reversed(range(_TRIES)):
        with explained():
            found = chosen_checkpoints(place, step)
        try:
            return _answered(place, found, step, act, request)
        except OrchestraError:
            with explained():
                if not left or step is not None or found[0] in chosen_checkpoints(place, None):
                    raise
            print(f"step {found[0].step} was removed meanwhile: the newest one is taken", file=sys.stderr)
    raise AssertionError("the last try returns or raises")


def _answered(
    place: Place, found: Sequence[StoredCheckpoint], step: int | None, act: str, request: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    for checkpoint in found:
        storage = place.config.checkpoint.dir or str(place.run.checkpoints)
        if checkpoint.place:
            storage = str(fallback_place(place.run, place.config.checkpoint.fallback_dir))
        look = first_look(place.storage_of(checkpoint), checkpoint)
        refuse_untold(look)
        damage = look.damage
        if damage is None:
            whole = {
                **request,
                "act": act,
                "config": str(place.run.config.absolute()),
                "storage": str(storage),
                "checkpoint": dataclasses.asdict(checkpoint),
            }
            done = _run(whole, import_path(place.config))
            if done.returncode == 0:
                return checkpoint.step, json.loads(done.stdout.splitlines()[-1])
            damage = done.stderr.strip()
            if done.returncode != _EXIT_DAMAGED:
                last = damage.splitlines()[-1:] or [f"exit code {done.returncode}"]
                raise OrchestraError(f"the model of step {checkpoint.step} could not be used: {last[0]}")
        if step is not None:
            raise DataError(f"the checkpoint of step {step} is damaged: {damage}")
        print(f"passed over step {checkpoint.step}: {damage}", file=sys.stderr)
    raise OrchestraError(f"none of {name_of(place.run)}'s {len(found)} checkpoints is intact")


def _run(request: Mapping[str, Any], path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "orchestra.train.inference.use_checkpoint"]
    return subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False, env=environment
    )
