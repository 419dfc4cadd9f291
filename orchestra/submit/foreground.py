"""Runs an attempt on this machine in the foreground and records how it started and ended. It shows nothing.

The node agent's side of the two planes' meeting place: workers write their verdicts, this adds the start of
the attempt, the ranks that died without a word, and the verdict of the whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.schema import Config
from launchers import processes
from launchers.errors import LauncherError
from launchers.local import run_local
from launchers.spec import Ending, LaunchSpec
from launchers.stops import StopRequests
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, LaunchError
from orchestra.events import EventWriter, node_writer, read_events
from orchestra.report.verdict import Verdict, judge, node_verdict, of_attempt, ranks_with_verdict, signal_name
from orchestra.rundir import RunDir
from orchestra.submit.launch import launch_spec
from orchestra.topology import batch_shape, layout

_NODE = 0
# What most often sends these signals to a worker.
_HINTS = {
    "SIGKILL": "from outside: often the kernel when memory runs out (dmesg tells), or a user's kill -9",
    "SIGSEGV": "a crash in native code; the rank's log may hold its last words",
    "SIGABRT": "an assertion in native code; the rank's log may hold its last words",
    "SIGBUS": "a memory-mapped file was cut short or a device went away; /dev/shm may be full",
}


@dataclass
class _Attempt:
    run: RunDir
    number: int
    events: EventWriter
    stops: StopRequests
    verdict: Verdict | None = None

    def seen(self) -> list[dict[str, object]]:
        return of_attempt(read_events(self.run), self.number)

    def conclude(self, ending: Ending) -> int:
        """Judge the ending, write that down and return its exit code."""
        # A full disk takes the record, not the verdict.
        with contextlib.suppress(OSError):
            self._record_killed_ranks(ending)
        self.verdict = judge(self.seen(), exit_code=ending.exit_code, stop_signal=self.stops.first)
        if not self.run.events.is_dir() and self.verdict.code != EXIT_INTERRUPTED:
            gone = f"{self.run.path} was removed while it trained, and its records with it"
            self.verdict = Verdict(EXIT_FAILED, "run directory removed", gone)
        with contextlib.suppress(OSError):
            self._record(self.verdict, ending)
        # As everybody reads it from now on.
        self.verdict = node_verdict(self.seen()) or self.verdict
        return self.verdict.code

    def _record(self, verdict: Verdict, ending: Ending) -> None:
        survivors = {"survivors": list(ending.survivors)} if ending.survivors else {}
        self.events.write(
            "finished" if verdict.code == EXIT_DONE else "failed",
            node=_NODE,
            code=verdict.code,
            cause=verdict.cause,
            message=verdict.message,
            step=verdict.step,
            **survivors,
        )

    def _record_killed_ranks(self, ending: Ending) -> None:
        spoke = ranks_with_verdict(self.seen())
        for failure in ending.failures:
            if failure.cleaned_up or failure.rank in spoke or self.stops.count():
                continue
            self.events.write("rank_failed", rank=failure.rank, pid=failure.pid, **_cause(failure.exit_code))


def _cause(exit_code: int) -> dict[str, object]:
    if exit_code >= 0:
        return {"code": EXIT_FAILED, "cause": f"exit code {exit_code}", "message": "it wrote no verdict"}
    name = signal_name(-exit_code)
    message = _HINTS.get(name, "")
    return {"code": EXIT_FAILED, "cause": f"killed by {name}", "message": message, "signal": name}


def _layout(config: Config, world_size: int) -> dict[str, object]:
    mesh = layout(config.parallelism, world_size)
    batch = batch_shape(config.train, mesh.dp)
    return {
        "layout": dataclasses.asdict(mesh),
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
    }


def train_here(
    config: Config, run: RunDir, attempt: int, *, tick: Callable[[int], None], search_path: Sequence[str] = ()
) -> Verdict:
    """Run one attempt to its end on this machine; SIGINT, SIGTERM and SIGHUP end it and every process of it.

    Main thread only. `config` is resolved; `tick` is called about ten times a second with the number of stop
    requests so far. Raises LaunchError when torchrun cannot be started or the run directory not be written.
    """
    spec = launch_spec(config, run, attempt, search_path)
    with StopRequests() as stops:
        events = _announced(config, run, attempt, spec)
        current = _Attempt(run, attempt, events, stops)
        try:
            run_local(spec, verdict=current.conclude, stops=stops.count, tick=lambda: tick(stops.count()))
        except LauncherError as error:
            with contextlib.suppress(OSError):
                events.write("failed", node=_NODE, code=EXIT_FAILED, cause="LaunchError", message=str(error))
            raise LaunchError(str(error)) from error
    assert current.verdict is not None
    return current.verdict


def _announced(config: Config, run: RunDir, attempt: int, spec: LaunchSpec) -> EventWriter:
    """Write that the attempt starts, and return the writer for what follows."""
    leader = processes.find(os.getpid())
    try:
        events = EventWriter(run, node_writer(attempt, _NODE), attempt)
        events.write(
            "attempt_started",
            node=_NODE,
            pid=os.getpid(),
            pid_started=None if leader is None else leader.started,
            nodes=spec.num_nodes,
            ranks_per_node=spec.ranks_per_node,
            **_layout(config, spec.world_size),
        )
    except OSError as error:
        raise LaunchError(f"{run.events}: cannot be written: {error.strerror}") from error
    return events
