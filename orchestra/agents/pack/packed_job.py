"""What the agent of a member that shares its node asks of the job: nothing that would touch the others.

The job belongs to `orchestra.agents.pack.__main__`, which started the agent. A member that is to go on in
another start of a job says so in its events, and waits in the array's list for its next place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from conf.schema import Config
from launchers import LauncherError
from launchers.slurm import this_job
from launchers.slurm.this_job import JobTask
from orchestra.agents.context import Reasons
from orchestra.agents.slurm_job import GoOnBy, SlurmJob, StopFacts, continuation
from orchestra.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.recovery.incidents import Verdict
from orchestra.recovery.policy import Decision
from orchestra.run.control import stop_requests
from orchestra.run.control.member_places import newest_place
from orchestra.run.events import EventWriter
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import newest_job, read_record


@dataclass(frozen=True)
class PlaceOfAgent:
    """Which place of which array's list an agent was started for."""

    array: int
    number: int

    @property
    def words(self) -> tuple[str, str]:
        """What follows the run on the agent's command line."""
        return "--place", self.name

    @property
    def name(self) -> str:
        """What the events call it."""
        return f"{self.array}.{self.number}"


def place_of(words: Sequence[str]) -> PlaceOfAgent | None:
    """Return the place that an agent's command line names; None where its job is its own."""
    if len(words) != 3 or words[1] != "--place":
        return None
    array, _, number = words[2].partition(".")
    return PlaceOfAgent(int(array), int(number))


def request_for_another(events: Iterable[Record], place: PlaceOfAgent) -> Record | None:
    """Return the event by which the agent of this place asked for another one; None where it did not, or a
    later agent of the place began an attempt after that.
    """
    events = list(events)
    asked = [event for event in events if event["event"] == "requeued" and event.get("place") == place.name]
    begun = [event["attempt"] for event in events if event["event"] == "attempt_started"]
    # By their numbers: the clocks of nodes differ.
    return asked[-1] if asked and asked[-1]["attempt"] >= max(begun, default=-1) else None


class PackedJob(SlurmJob):
    """A place in a job that several members of a sweep share."""

    def __init__(self, run: RunDir, config: Config, task: JobTask, place: PlaceOfAgent) -> None:
        super().__init__(run, config, task)
        self._place = place

    def refusal(self) -> str | None:
        """Return why this place does not train the member: the list decides, not the job's number."""
        entry = newest_job(read_record(self._run)) or {}
        if entry.get("pack") != self._place.array:
            return f"another job was submitted later for {self._run.path.parent.name}/{self._run.name}"
        place = newest_place(self._run, self._place.array)
        if place is None or place.number != self._place.number:
            return f"{self._run.path.parent.name}/{self._run.name} was taken by another job"
        return None

    def go_on(
        self, verdict: Verdict, attempt: int, events: EventWriter, reasons: Reasons | None = None
    ) -> str:
        if verdict.code not in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return ""
        why = self._reasons(attempt) if reasons is None else reasons()
        job = None
        with contextlib.suppress(LauncherError):
            job = this_job.own_job(self._task.job)
        plan = continuation(StopFacts(self._config.cluster.requeue, why, job, self._task.restart))
        if plan.how in (GoOnBy.end, GoOnBy.give_up):
            return f"it does not go on by itself: {plan.reason}"
        if verdict.code == EXIT_INTERRUPTED and plan.how is not GoOnBy.leave:
            return ""
        return self._left(events, plan.reason)

    def requeue(self, decision: Decision, attempt: int, events: EventWriter) -> str:
        facts = {"after": attempt, "rule": decision.rule, "exclude": list(decision.exclude)}
        return self._left(events, decision.reason, **facts)

    def moved_to(self) -> str | None:
        """Return nothing: no job is submitted for a place alone."""
        return None

    def complete_history(self) -> None:
        """Leave the job's records to who keeps its members at work."""

    def let_go(self, hosts: Collection[str]) -> None:
        """Leave the node to the other members."""

    def release(self, lost: Sequence[int]) -> None:
        """Leave the job to the other members."""

    def _left(self, events: EventWriter, reason: str, **facts: object) -> str:
        with contextlib.suppress(OSError):
            words = {"how": "place", "place": self._place.name, "reason": reason}
            events.write("requeued", job=self._task.job, **words, **facts)
        return f"it waits for another place in its sweep's jobs ({reason})"

    def _reasons(self, attempt: int) -> frozenset[str]:
        try:
            requests = stop_requests.read_requests(self._run, attempt)
        except OSError:
            return frozenset()
        return frozenset(request.reason for request in requests)
