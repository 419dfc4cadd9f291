"""Runs as their records tell them, written by the product's own writers, at times that a test chooses."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.schema import CheckpointConfig, Config, TrainConfig
from orchestra.alerts.detect import Findings, look
from orchestra.alerts.observe import observe
from orchestra.alerts.observed import Limits
from orchestra.report.run_state import RunState
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter, write_atomically
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase

BEGIN = 1_800_000_000.0


def noisy(loss: Callable[[int], float], spread: float = 0.02) -> Callable[[int], float]:
    """Return a loss with noise, the same one each time."""
    source = random.Random(7)
    noise = [source.gauss(0.0, spread) for _ in range(10_000)]
    return lambda step: loss(step) + noise[step]


def flat(_step: int) -> float:
    return 2.0


class RecordedRun:
    """A run of two nodes with a row for each step, a second apart; `time` is where its clock stands."""

    def __init__(self, parent: Path, config: Config | None = None) -> None:
        self.run = RunDir(parent / "first")
        self.run.path.mkdir(parents=True)
        self.run.record.write_text(json.dumps({"name": "first", "created": BEGIN, "pid": None, "jobs": []}))
        of_tests = Config(checkpoint=CheckpointConfig(every_steps=100), train=TrainConfig(steps=100_000))
        write_config(self.run.config, config or of_tests)
        self.time, self.step, self.attempt = BEGIN, 0, -1
        self._metrics = JsonLinesWriter(self.run.metrics)

    def write(self, event: str, rank: int | None = None, **evidence: Any) -> RecordedRun:
        """Write an event of the newest attempt, of its leader or of a rank."""
        name = node_writer(self.attempt, 0) if rank is None else rank_writer(self.attempt, rank)
        who = {"node": 0} if rank is None else {"rank": rank}
        writer = EventWriter(self.run, name, self.attempt, **who)
        writer.write(event, **{"time": self.time, "host": "node1", **evidence})
        writer.close()
        return self

    def start(self, world_size: int = 4) -> RecordedRun:
        """Begin the next attempt, and its training half a minute later."""
        self.attempt += 1
        self.write("attempt_started", nodes=2, ranks_per_node=world_size // 2, pid=1)
        self.time += 30.0
        return self.write("training_started", rank=0, world_size=world_size)

    def train(
        self, steps: int, loss: Callable[[int], float] = flat, seconds: float = 1.0, **row: Any
    ) -> RecordedRun:
        """Train some steps; the nodes' heartbeats and the checkpoints that are due are written too."""
        for _ in range(steps):
            self.step, self.time = self.step + 1, self.time + seconds
            whole = {"step": self.step, "time": self.time, "loss": loss(self.step), "grad_norm": 1.0}
            speed = {"tokens_per_s": 4096 / seconds, "step_time_s": seconds, "data_time_s": 0.01}
            self._metrics.write({**whole, **speed, "attempt": self.attempt, **row})
            if self.step % 100 == 0:
                self.save()
        return self.beat(0).beat(1)

    def save(self) -> RecordedRun:
        self.write("checkpoint_started", rank=0, step=self.step, blocked_s=0.1)
        return self.write("checkpoint_committed", rank=0, step=self.step)

    def fail(self, cause: str = "ValueError") -> RecordedRun:
        """Let a rank fail, and the leader decide to start again."""
        self.write("failed", rank=1, host="node2", code=1, cause=cause, step=self.step)
        self.write("failed", code=1, cause=cause)
        return self.write("restarting", decision="restart", reason=cause, wait_s=1)

    def beat(
        self, node: int, phases: dict[str, list[int]] | None = None, silence_s: float = 0.2
    ) -> RecordedRun:
        """Let a node's agent write how far its ranks are."""
        summary = {"time": self.time, "attempt": self.attempt, "node": node, "host": f"node{node + 1}"}
        place = {"phases": phases or {"forward": [2 * node, 2 * node + 1]}, "longest_silence_s": silence_s}
        self.run.heartbeats.mkdir(exist_ok=True)
        write_atomically(self.run.heartbeat(node), json.dumps({**summary, **place}))
        os.utime(self.run.heartbeat(node), (self.time, self.time))
        return self

    def wait(self, seconds: float) -> RecordedRun:
        self.time += seconds
        return self

    def look(self, state: RunPhase = RunPhase.running, **limits: float) -> Findings:
        """Ask all detectors now."""
        known = RunState("first", str(self.run.path), state, attempts=self.attempt + 1, cause="ValueError")
        # How full the disk is here is no matter.
        limits = {"disk_free_bytes": 0.0, **limits}
        return look(observe(known, self.time, {}), Limits(**limits))  # type: ignore[arg-type]

    def alerts(self, state: RunPhase = RunPhase.running, **limits: float) -> list[str]:
        """Return the keys of the alerts that fire now."""
        return [alert.key for alert in self.look(state, **limits).alerts]
