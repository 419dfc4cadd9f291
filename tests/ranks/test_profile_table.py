"""The shares of a profiled step on two ranks: they make up the step, and the bytes are the counter's.

How long anything takes on a busy machine nobody knows; the first layer pauses in both passes, and no share is
shorter than that.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attempts
import pytest
from pool import Ranks
from small_trainings import EVEN, config_of, start, take_steps, tokens_of
from torch import Tensor, nn

from conf.schema import ProfileConfig
from orchestra.run.heartbeat import Heart, Phase
from orchestra.run.paths import RunDir
from orchestra.sizes.step_shares import OTHER, Part, read_shares
from orchestra.train.watch.profile import StepProfiler

FIRST, LAST = 3, 5
# Seconds, of each micro-batch.
PAUSE_S = 0.02
LAYOUTS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 3},
    {"tp": 2, "sequence_parallel": True},
]


def profiled(rank: int, world: int, parallelism: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a few steps under the profiler; say how long they took and what they sent, by other clocks."""
    config = config_of(EVEN, **parallelism)
    training, mesh = start(rank, 2, config)
    (_, first_layer), *_ = training.parallelized.model.numbered_layers()
    first_layer.register_forward_hook(pause)
    traced = ProfileConfig(enabled=True, steps=[FIRST, LAST], ranks=[0])
    # What a step leaves under way ends before the trace does, and before the pool's next training.
    settle = training.parallelized.stage.settle
    profiler = StepProfiler(traced, RunDir(folder), rank, mesh.traffic, settle)
    inner_s, outer_s, sent = 0.0, 0.0, 0
    for step in range(1, LAST + 2):
        before = sum(mesh.traffic.bytes_sent.values())
        began_outside = time.perf_counter()
        with profiler.around_step(step):
            began = time.perf_counter()
            take_steps(config, training, mesh, [step])
            took = time.perf_counter() - began
        if FIRST <= step <= LAST:
            inner_s += took
            outer_s += time.perf_counter() - began_outside
            sent += sum(mesh.traffic.bytes_sent.values()) - before
    profiler.close()
    settle()
    num_steps, num_micro_batches = LAST - FIRST + 1, len(tokens_of(config, 1, mesh, training))
    return {
        "at least": inner_s / num_steps,
        "at most": outer_s / num_steps,
        "paused": num_micro_batches * PAUSE_S,
        "bytes": sent / num_steps,
    }


def pause(_layer: nn.Module, _given: object, made: Tensor) -> None:
    """Take some time, and again where the gradient of what the layer made is there."""
    time.sleep(PAUSE_S)
    made.register_hook(lambda _gradient: time.sleep(PAUSE_S))


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)
def test_the_shares_make_up_the_step_and_the_bytes_are_those_that_were_counted(
    ranks: Ranks, tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    expected, _ = ranks(2).run(profiled, parallelism=parallelism, folder=tmp_path)
    shares = read_shares(RunDir(tmp_path).profile)
    assert shares is not None
    assert (shares.rank, shares.first_step, shares.last_step) == (0, FIRST, LAST)
    assert sum(shares.parts_s.values()) == pytest.approx(shares.step_s, rel=1e-6)
    assert 0.999 * expected["at least"] < shares.step_s < 1.001 * expected["at most"]
    assert shares.total_bytes == pytest.approx(expected["bytes"], rel=1e-12)
    assert shares.total_bytes > 0
    for part in (Part.forward, Part.backward, Part.optimizer, Part.communication):
        assert shares.parts_s[part.value] > 0, part
    for part in (Part.forward, Part.backward):
        assert shares.parts_s[part.value] > 0.999 * expected["paused"], part
    assert shares.parts_s[OTHER] >= 0
    assert shares.exposed_s <= shares.communication_s <= shares.step_s
    table = "\n".join(shares.table())
    assert "communication, exposed" in table
    (operations,) = RunDir(tmp_path).profile.glob("rank-00000-*.txt")
    assert operations.read_text().startswith(table)

    record = json.loads((RunDir(tmp_path).profile / "summary.json").read_text())
    assert sum(record["shares"].values()) == pytest.approx(1.0)
    assert record["hidden_share"] == shares.hidden_share


def acts_of_a_traced_run(rank: int, world: int, folder: Path) -> list[str]:
    """Train a run that traces its second and third step; return what its heartbeat and its profiler did."""
    acts: list[str] = []
    beat, begin, write = Heart.beat, StepProfiler._begin, StepProfiler._write

    def beats(self: Heart, phase: Phase, step: int, *places: int) -> None:
        acts.append(f"{phase.name} {step}")
        beat(self, phase, step, *places)

    def begins(self: StepProfiler, step: int) -> None:
        acts.append("trace begins")
        begin(self, step)

    def writes(self: StepProfiler, *arguments: Any, **options: Any) -> None:
        acts.append("trace is written")
        write(self, *arguments, **options)

    config = attempts.with_steps(attempts.config_of(), 5)
    traced = ProfileConfig(enabled=True, steps=[2, 3], ranks=[0])
    config = replace(config, train=replace(config.train, profile=traced))
    with (
        patch.object(Heart, "beat", beats),
        patch.object(StepProfiler, "_begin", begins),
        patch.object(StepProfiler, "_write", writes),
    ):
        attempts.attempt_of(rank, world, folder, 0, config)
    return acts


def test_a_trace_begins_and_is_written_outside_of_steps(ranks: Ranks, tmp_path: Path) -> None:
    """Both take seconds, the import of torch's compiler too: a step that takes so long counts as hanging."""
    (acts,) = ranks(1).run(acts_of_a_traced_run, folder=tmp_path)
    began, written = acts.index("trace begins"), acts.index("trace is written")
    assert acts.index("record 1") < began < acts.index("step 2")
    assert acts.index("record 3") < written < acts.index("step 4")
    assert (acts.count("trace begins"), acts.count("trace is written")) == (1, 1)
