"""At which steps an attempt saves: every so many, and for `checkpoint.every_steps=auto` how many that is.

`auto` is decided once per attempt by rank 0, and written down: by what steps and saves of earlier attempts
took, else by the plan in the run's record, else by the first steps of this attempt. It saves nothing itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestra import save_interval
from orchestra.events import is_number, read_events
from orchestra.flops import num_parameters
from orchestra.metrics_file import read_metrics
from orchestra.save_interval import Interval
from orchestra.train.beginning import Setting, Tell, answered
from orchestra.train.record import run_record

# Steps of a run's first attempt that are timed where nothing else tells a step's time; the very first is not.
_TIMED_STEPS = 20
# The newest so many rows and saves are believed.
_RECENT = 20
# The fp32 master of a parameter and Adam's two moments.
_SAVED_BYTES = 12


class SaveRhythm:
    """Tells one rank when to save. All ranks ask it about the same steps in the same order."""

    def __init__(self, setting: Setting, tell: Tell) -> None:
        self._setting = setting
        self._tell = tell
        chosen = setting.config.checkpoint.every_steps
        self._is_open = chosen == save_interval.AUTO
        self._every_steps = chosen if isinstance(chosen, int) else None
        self._begin = 0
        self._first_over: float | None = None

    def begin(self, step: int) -> None:
        """Settle, where earlier attempts or the plan tell it, how often this one saves. *Collective*."""
        self._begin = step
        if self._is_open:
            self._settle("save interval", self._known)

    def is_due(self, step: int) -> bool:
        """Whether the state behind `step` is to be saved by the rhythm. Of an attempt that has to time its
        first steps it is *collective* behind the last of those.
        """
        if self._is_open:
            self._time(step)
        return self._every_steps is not None and step % self._every_steps == 0

    def _time(self, step: int) -> None:
        num_steps = step - self._begin
        if num_steps == 1:
            self._first_over = time.perf_counter()
        if num_steps == 1 + _TIMED_STEPS:
            self._settle("save interval timed", self._timed)

    def _settle(self, topic: str, question: Callable[[], Interval | None]) -> None:
        def told() -> dict[str, Any] | None:
            found = question()
            return None if found is None else found.to_json()

        evidence: Mapping[str, Any] | None = answered(self._setting.peers, topic, told)
        if evidence is None:
            return
        self._every_steps, self._is_open = int(evidence["every_steps"]), False
        if self._setting.peers.is_coordinator:
            self._tell("save_interval", evidence)

    # What rank 0 knows.

    def _known(self) -> Interval | None:
        setting = self._setting
        recent = read_metrics(setting.run)[-_RECENT:]
        times = [float(row["step_time_s"]) for row in recent if is_number(row.get("step_time_s"))]
        if times:
            return self._interval(statistics.median(times))
        planned = run_record(setting.run).get("save_interval")
        step_time_s = planned.get("step_time_s") if isinstance(planned, dict) else None
        if not is_number(step_time_s) or step_time_s <= 0:
            return None
        return self._interval(float(step_time_s), source="predicted")

    def _timed(self) -> Interval | None:
        assert self._first_over is not None
        return self._interval((time.perf_counter() - self._first_over) / _TIMED_STEPS)

    def _interval(self, step_time_s: float, source: str = "measured") -> Interval:
        config, world_size = self._setting.config, self._setting.mesh.world_size
        share = num_parameters(config.model) * _SAVED_BYTES / world_size
        stalls, writes = self._measured_saves()
        stall_s = statistics.median(stalls) if stalls else save_interval.assumed_stall_s(share)
        write_s = statistics.median(writes) if writes else save_interval.assumed_write_s(share)
        mttf = save_interval.mttf_s(world_size, config.cluster.mtbf_device_hours)
        found = save_interval.chosen(max(step_time_s, 1e-6), stall_s, mttf, write_s=write_s, source=source)
        return replace(found, every_steps=min(found.every_steps, config.train.steps))

    def _measured_saves(self) -> tuple[list[float], list[float]]:
        """Return what the newest saves took: the training's wait, and the writing behind it, in seconds."""
        stalls: list[float] = []
        writes: list[float] = []
        started: dict[Any, float] = {}
        for event in read_events(self._setting.run, ("checkpoint_started", "checkpoint_committed")):
            step = event.get("step")
            if event["event"] == "checkpoint_started" and is_number(event.get("blocked_s")):
                stalls.append(float(event["blocked_s"]))
                started[step] = event["time"]
            elif step in started:
                writes.append(max(0.0, event["time"] - started[step]))
        return stalls[-_RECENT:], writes[-_RECENT:]
