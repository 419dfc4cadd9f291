"""The records of a simulated attempt, as leader, agents and ranks write them, and the incident they tell.

The reading is the real one, `orchestra.recovery.incidents`. Of a long run it gets what it looks at: this
attempt, the one before it, and the one that made the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestra import control
from orchestra.errors import EXIT_FAILED, EXIT_STOPPED
from orchestra.jsonl import Record
from orchestra.plan.failures.causes import Cause
from orchestra.recovery.incidents import Incident, incidents
from orchestra.recovery.policy import Decision

_KILLED = "killed by SIGKILL"


class Records:
    """The newest records of a run."""

    def __init__(self) -> None:
        self._saving: list[Record] = []
        self._before: list[Record] = []
        self._own: list[Record] = []

    def begin(self, attempt: int, time: float, hosts: Sequence[str], job: int) -> None:
        """Write that an attempt starts on these hosts."""
        self._before, self._own = self._own, []
        self._write(attempt, time, "attempt_started", node=0, host=hosts[0], nodes=len(hosts), job=str(job))

    def restored(self, time: float, step: int, *, from_memory: bool) -> None:
        """Write behind which step the attempt goes on."""
        self._add(time, "restored", step=step, source="memory" if from_memory else "checkpoint")

    def training(self, time: float) -> None:
        """Write that the first step begins."""
        self._add(time, "training_started", rank=0)

    def committed(self, time: float, step: int) -> None:
        """Write the newest checkpoint of the attempt."""
        self._add(time, "checkpoint_committed", step=step)
        self._saving = [self._own[0], self._own[-1]]

    def failed(self, time: float, cause: Cause, hosts: Sequence[str], step: int | None) -> Incident:
        """Write how the attempt failed, on which hosts, and in which step if it was in one."""
        if cause in (Cause.node, Cause.switch):
            for host in hosts:
                self._add(time, "node_lost", host=host, cause="its agent is silent")
        elif cause is Cause.hang:
            told = {} if step is None else {"step": step}
            self._add(time, "hang_detected", rank=0, host=hosts[0], phase="reduce", **told)
        else:
            self._add(time, "rank_failed", rank=0, host=hosts[0], cause=_KILLED, signal="SIGKILL", code=1)
        return self._concluded(time, EXIT_FAILED)

    def stopped(self, time: float, step: int, *, is_preempted: bool) -> Incident:
        """Write that the scheduler ends the job, for another one or at its time limit, behind `step`."""
        reason = control.PREEMPTED if is_preempted else control.TIME_LIMIT
        self._add(time, "stop_requested", reason=reason, step=step)
        return self._concluded(time, EXIT_STOPPED)

    def decided(self, time: float, decision: Decision) -> None:
        """Write what follows."""
        told = {"decision": decision.action.name, "rule": decision.rule, "reason": decision.reason}
        self._add(time, "restarting", **told, exclude=list(decision.exclude), wait_s=decision.wait_s)

    def _concluded(self, time: float, code: int) -> Incident:
        self._add(time, "failed", node=0, code=code, cause="", message="")
        known = {it["attempt"] for it in (*self._before, *self._own)}
        saving = [it for it in self._saving if it["attempt"] not in known]
        return incidents([*saving, *self._before, *self._own])[-1]

    def _add(self, time: float, event: str, **evidence: Any) -> None:
        self._write(self._own[0]["attempt"], time, event, **evidence)

    def _write(self, attempt: int, time: float, event: str, **evidence: Any) -> None:
        self._own.append({"time": time, "attempt": attempt, "event": event, **evidence})
