"""What the detectors look at and what they find: plain values. Pure; `orchestra.alerts.observe` fills them.

A detector is a function of an `ObservedRun` that returns alerts, or why it cannot see: it never takes the
absence of records for good news. One that has nothing to look at, such as the pace of a run that waits in a
queue, returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from conf.schema import Config
from orchestra.recovery.accounting import Accounts
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.report.spending import Spending
from orchestra.run.files import Record
from orchestra.run.record import RunPhase


@dataclass(frozen=True)
class Limits:
    """From where on something is worth a word. Shares are of 1, times in seconds."""

    # A row of metrics that is later than so many times the usual wait for one; never sooner than the floor.
    stall_factor: float = 2.0
    stall_floor_s: float = 30.0
    # Of a run's own earlier speed, and of its plan's.
    own_speed: float = 0.8
    planned_speed: float = 0.7
    # A node writes its heartbeat every ten seconds.
    heartbeat_s: float = 60.0
    # Failed attempts within an hour, or in a row without a new checkpoint.
    restarts: int = 3
    # Of the time in which the run had its nodes, once that is so long.
    goodput: float = 0.8
    goodput_after_s: float = 900.0
    # Spreads above the median of the rows before, as recovery.loss_spike.factor; and how many such rows
    # among the last hundred.
    spike_factor: float = 6.0
    spikes: int = 2
    # So many times the wait for the next checkpoint, and a minute for writing it.
    checkpoint_factor: float = 2.0
    # Free on a disk: at least this, and room for two checkpoints.
    disk_free_bytes: float = float(1 << 30)
    # Of a sweep's members that have ended.
    failing_members: float = 0.1


@dataclass(frozen=True)
class Alert:
    """Something is wrong with `subject`: what shows it, since when (Unix seconds), and what to do.

    `detail` tells alerts of one detector apart that can stand side by side.
    """

    detector: str
    subject: str
    evidence: str
    since: float
    advice: str
    detail: str = ""

    @property
    def key(self) -> str:
        """The same for the same trouble each time that it is looked for."""
        return f"{self.detector}:{self.detail}" if self.detail else self.detector


@dataclass(frozen=True)
class CannotSee:
    """A detector lacks what it looks at: nothing is known to be wrong, and nothing to be right."""

    detector: str
    subject: str
    why: str


Finding = Alert | CannotSee


@dataclass(frozen=True)
class NodeBeat:
    """What a node's agent wrote last of its ranks. `heard`: when, in Unix seconds."""

    node: int
    host: str
    heard: float
    phases: Mapping[str, Sequence[int]]
    longest_silence_s: float


@dataclass(frozen=True)
class Disk:
    """The file system of a place that the run writes to. `unseen` says why nothing is known of it."""

    place: str
    free_bytes: int = 0
    free_inodes: int | None = None
    unseen: str = ""


@dataclass(frozen=True)
class ObservedRun:
    """One run's records at Unix time `now`: rows that count by rising step, each with a time, and events by
    rising time.
    """

    name: str
    now: float
    state: RunPhase
    rows: Sequence[Record] = ()
    # When the file server saw the newest of them; 0.0: nobody says.
    rows_heard: float = 0.0
    events: Sequence[Record] = ()
    # Of the newest attempt.
    nodes: Sequence[NodeBeat] = ()
    accounts: Accounts = field(default_factory=Accounts)
    used: Spending = field(default_factory=Spending)
    config: Config | None = None
    no_config: str = "its configuration was not read"
    cause: str | None = None
    planned_tokens_per_s: float | None = None
    no_plan: str = "no plan was made"
    disks: Sequence[Disk] = ()
    # Commands to type, by their verb.
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt that was started."""
        return newest_attempt(self.events)

    @property
    def training(self) -> Attempt | None:
        """The newest attempt, where it has begun to train and is not over."""
        attempt = self.attempt
        if self.state is not RunPhase.running or attempt is None or attempt.verdict is not None:
            return None
        return None if attempt.training_started is None else attempt

    @property
    def own_rows(self) -> list[Record]:
        """The rows of the newest attempt."""
        attempt = self.attempt
        return [] if attempt is None else [row for row in self.rows if row.get("attempt") == attempt.number]

    def command(self, verb: str) -> str:
        """Return what to type for this run, in backquotes."""
        return f"`{self.commands.get(verb, f'orchestra {verb} {self.name}')}`"

    def alert(self, detector: str, evidence: str, since: float, advice: str, detail: str = "") -> Alert:
        """Return an alert about this run."""
        return Alert(detector, self.name, evidence, since, advice, detail)

    def cannot_see(self, detector: str, why: str) -> CannotSee:
        """Return that a detector cannot see."""
        return CannotSee(detector, self.name, why)


Detector = Callable[[ObservedRun, Limits], Sequence[Finding]]
