"""What rank heartbeats cost: one beat with its look for planned faults, and one look of the node agent.

`python -m benchmarks.heartbeats`. Processor time, the median of repeated rounds, so that a busy machine does
not show.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from orchestra.agents.hang_watch import HangWatch, WatchedRanks
from orchestra.recovery.hangs import LOOK_S, LimitRules
from orchestra.run.events import EventWriter
from orchestra.run.heartbeat import FOLDER_VARIABLE, Phase, beats_folder, open_heart, remove_records
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import planned_faults
from orchestra.train.hooks import HeartbeatHook, StepHooks
from orchestra.train.watch.inject_faults import Faults

_ROUNDS = 15
_BEATS = 20_000
_LOOKS = 200
_RANKS = 8


def median_us(work: Callable[[], object], times: int) -> float:
    """Return the median processor time of one of `times` calls in microseconds, over some rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - began) / times * 1e6)
    return statistics.median(rounds)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place) / "run")
        folder = beats_folder(run)
        os.environ[FOLDER_VARIABLE] = str(folder)
        hearts = [open_heart(run, 0, rank) for rank in range(_RANKS)]
        planned = planned_faults([{"at_step": 30, "rank": 1}])
        hooks = StepHooks((HeartbeatHook(hearts[0]), Faults(planned, 0, 1)))
        beat = median_us(lambda: hearts[0].beat(Phase.forward, 7, 3), _BEATS)
        moment = median_us(lambda: hooks.enter(Phase.forward, 7), _BEATS)
        now = [0.0]

        def look() -> None:
            now[0] += LOOK_S
            for heart in hearts:
                heart.beat(Phase.forward, int(now[0]))
            watch.look()

        rules = LimitRules(setup_s=1e9, silent_s=1e9, storage_s=1e9, closing_s=1e9)
        watched = WatchedRanks(run, 0, 0, tuple(range(_RANKS)), _RANKS, folder)
        watch = HangWatch(watched, rules, EventWriter(run, "agent", 0), clock=lambda: now[0])
        looked = median_us(look, _LOOKS)
        idle = median_us(lambda: bool(watch.look()), _BEATS)
        remove_records(folder, range(1))
    print(f"one beat                                     {beat:8.2f} µs")
    print(f"one moment of a step (beat and faults)       {moment:8.2f} µs")
    print(f"the agent's look at {_RANKS} ranks, once a second   {looked:8.1f} µs")
    print(f"the agent's look in between                  {idle:8.2f} µs")


if __name__ == "__main__":
    main()
