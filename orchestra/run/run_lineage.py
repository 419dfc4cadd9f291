"""A run's lineage from its events: where each attempt began, and where the run went back to since.

The event `restored` is an attempt's record of its begin: on the disk before it trains, with the step it goes
on from, whose state that was, and which checkpoints of later steps lay there then. The one function that
decides what counts is `checkpointing.lineage.Lineage`. Read by both planes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

from checkpointing.checkpoint_errors import StorageError, SupersededError
from checkpointing.lineage import AttemptBegin, Base, Lineage
from orchestra.run.control import stop_requests
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.rollback import EVENT as ROLL_BACK
from orchestra.run.rollback import RollBack, roll_backs

BEGIN = "restored"
_STARTED = "attempt_started"
# The `source` of one that read no storage.
MEMORY = "memory"
# In that event: step and attempt of the checkpoints of later steps.
LATER = "later_checkpoints"
# What a lineage is made of.
EVENTS = (BEGIN, ROLL_BACK)


def lineage_of(events: Iterable[Record]) -> Lineage:
    """Return the lineage that a run's events tell; without any everything is on the line."""
    events = list(events)
    begins = _begins(events)
    back: dict[int, AttemptBegin] = {}
    for roll_back in _obeyed(roll_backs(events), begins):
        following = roll_back.attempt + 1
        if all(attempt <= roll_back.attempt for attempt in begins):
            to = min(roll_back.to, back[following].base.step if following in back else roll_back.to)
            back[following] = AttemptBegin(following, Base(to, roll_back.attempt), has_begun=False)
    return Lineage.of([*begins.values(), *back.values()])


def obeyed_roll_backs(events: Iterable[Record]) -> list[RollBack]:
    """Return the roll-backs that count. An attempt that was replaced may have asked for one afterwards: the
    next one had begun later than at the step that it names.
    """
    events = list(events)
    return _obeyed(roll_backs(events), _begins(events))


def _obeyed(found: Iterable[RollBack], begins: dict[int, AttemptBegin]) -> list[RollBack]:
    def is_obeyed(roll_back: RollBack) -> bool:
        following = min((attempt for attempt in begins if attempt > roll_back.attempt), default=None)
        return following is None or begins[following].base.step <= roll_back.to

    return [roll_back for roll_back in found if is_obeyed(roll_back)]


def _begins(events: Iterable[Record]) -> dict[int, AttemptBegin]:
    found = {}
    for event in events:
        if event.get("event") == BEGIN and is_whole(event.get("step")):
            writer = event.get("generation")
            base = Base(event["step"], writer if is_whole(writer) else None)
            found[event["attempt"]] = AttemptBegin(event["attempt"], base, _later(event.get(LATER)))
    return found


def _later(value: object) -> frozenset[tuple[int, int | None]] | None:
    if not isinstance(value, list):
        return None
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    return frozenset(
        (step, attempt)
        for step, attempt in pairs
        if is_whole(step) and (attempt is None or is_whole(attempt))
    )


def newest_checkpoint(events: Iterable[Record]) -> int | None:
    """Return the newest step on the line that was committed, restored from storage or gone back to: the run
    would go on from it. None where there is none.
    """
    events = list(events)
    found = lineage_of(events)
    steps = [
        event["step"]
        for event in events
        if event.get("event") in ("checkpoint_committed", BEGIN) and event.get("source") != MEMORY
        if is_whole(event.get("step")) and found.is_on_line(event["step"], event["attempt"])
    ]
    steps += [turn.to for turn in obeyed_roll_backs(events) if found.is_on_line(turn.to, turn.attempt)]
    return max(steps, default=0) or None


def read_lineage(run: RunDir) -> Lineage:
    """Return a run's lineage as it is on record now."""
    return lineage_of(read_events(run, EVENTS))


def newer_attempt(run: RunDir, attempt: int) -> int | None:
    """Return the newest attempt that was started after this one; None where none was. Raises OSError."""
    claimed = stop_requests.claimed_attempt(run)
    if claimed is None or claimed <= attempt:
        return None
    # A claim alone may be a dead leader's.
    events = read_events(run, (_STARTED,))
    started = [event["attempt"] for event in events if event["event"] == _STARTED]
    return max((number for number in started if number > attempt), default=None)


class AttemptLineage:
    """The lineage as an attempt needs it while it lives: read once, and again where its own begin was
    recorded. Asked from any thread.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._read: Lineage | None = None

    def __call__(self) -> Lineage:
        """Return the lineage.

        Raises SupersededError where a newer attempt has begun: nothing is this one's to judge then; and
        StorageError where the run directory cannot be read.
        """
        try:
            if (newer := newer_attempt(self._run, self._attempt)) is not None:
                raise SupersededError(f"attempt {newer} has begun: it judges what counts")
            read = self._read
            if read is None:
                read = self._read = read_lineage(self._run)
        except OSError as error:
            raise StorageError(f"{self._run.path}: {error.strerror or error}") from error
        return read

    def forget(self) -> None:
        """Read again when asked next."""
        self._read = None
