"""The policy as a table: situations, each with an example of a log, and what is decided then.

What users read (docs/recovery.md) and what is tested are the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.recovery.incidents import Incident, Kind
from orchestra.recovery.policy import MOST_NOT_CHARGED, Action, Decision, Resources, Rules, decide
from orchestra.run.rollback import BROKEN_DEVICE, SPIKE, RollBack


@dataclass(frozen=True)
class Row:
    """One situation. `code` is None where the run goes on."""

    situation: str
    action: Action
    incidents: tuple[Incident, ...]
    resources: Resources
    # What happens, in a few words.
    told: str
    code: int | None = None
    charged: bool = False
    wait: str = ""

    def decision(self) -> Decision:
        """Return what the policy decides in the example, under the default rules."""
        return decide(self.incidents, self.resources, Rules())


def markdown() -> str:
    """Return the table as docs/recovery.md shows it."""
    head = "| what happened | what follows | charged | wait | exit code | rule |\n|---|---|---|---|---|---|\n"
    return head + "".join(_line(row) for row in ROWS)


def _line(row: Row) -> str:
    code = "" if row.code is None else str(row.code)
    charged = "yes" if row.charged else ""
    cells = (row.situation, row.told, charged, row.wait, code, f"`{row.decision().rule}`")
    return f"| {' | '.join(cells)} |\n"


# The examples: a run on four nodes that saved step 100 and reached step 150.

_HOSTS = ("node1", "node2", "node3", "node4")
_FOUR = Resources(wanted_nodes=4, min_nodes=None, hosts=_HOSTS, can_requeue=True)
_WITH_SPARE = replace(_FOUR, spares=("node5",))
_LEFT = _HOSTS[:1] + _HOSTS[2:]

_ERROR = Incident(
    attempt=0,
    kind=Kind.rank_failed,
    cause="ValueError in train/step.py:run",
    time=0.0,
    code=EXIT_FAILED,
    rank=3,
    host="node2",
    step=150,
    step_is_exact=True,
    began=100,
    committed=100,
    num_nodes=4,
)
_KILLED = replace(_ERROR, cause="killed by SIGKILL", blamed=("node2",), step_is_exact=False)
_EARLY = replace(_ERROR, step=100, before_first_step=True)
_HANG = replace(_KILLED, kind=Kind.hang, cause="hang in forward", step_is_exact=True)
_NODE = replace(_KILLED, kind=Kind.node_lost, cause="node lost")
_AGENT = replace(_KILLED, kind=Kind.agent_lost, cause="agent lost")
_LOSS = replace(_ERROR, kind=Kind.loss, cause=SPIKE, host=None, roll_back=RollBack(0, 150, 50, SPIKE))
_REPLAY = replace(
    _ERROR, kind=Kind.replay, cause=BROKEN_DEVICE, roll_back=RollBack(0, 150, 100, BROKEN_DEVICE)
)
_LIMIT = replace(_ERROR, kind=Kind.time_limit, cause="time limit", code=EXIT_STOPPED, host=None)
_LEADER = replace(_NODE, kind=Kind.lost, cause="its leader went away", blamed=(), host=None)


def _log(*parts: Incident) -> tuple[Incident, ...]:
    """Return incidents of attempts 0, 1, 2 …, the first one started by a person."""
    return tuple(replace(it, attempt=number, by_hand=number == 0) for number, it in enumerate(parts))


def _elsewhere(incident: Incident, step: int, host: str = "node3") -> Incident:
    """Return the same at another step, on another host."""
    blamed = (host,) if incident.blamed else ()
    return replace(incident, step=step, host=host, blamed=blamed)


def _ended(kind: Kind, cause: str, code: int) -> tuple[Incident, ...]:
    return _log(replace(_ERROR, kind=kind, cause=cause, code=code))


_KEPT = replace(_elsewhere(_KILLED, 350, "node4"), committed=300)
_FOUR_ERRORS = [replace(_ERROR, step=step) for step in (150, 120, 141, 133)]

ENDS: Sequence[Row] = (
    Row(
        "the last step was trained",
        Action.end,
        _ended(Kind.finished, "finished", EXIT_DONE),
        _FOUR,
        "done",
        code=EXIT_DONE,
    ),
    Row(
        "stopped on request: `orchestra cancel`, SIGTERM",
        Action.end,
        _ended(Kind.stopped, "cancel", EXIT_STOPPED),
        _FOUR,
        "saved and ended; `orchestra resume` goes on",
        code=EXIT_STOPPED,
    ),
    Row(
        "Ctrl-C",
        Action.end,
        _ended(Kind.stopped, "asked to stop", EXIT_INTERRUPTED),
        _FOUR,
        "ended at once",
        code=EXIT_INTERRUPTED,
    ),
    Row(
        "a rank says that starting again would not help: non-finite loss that stays, foreign checkpoints",
        Action.give_up,
        _ended(Kind.refused, "NonFiniteError in train/loop.py:train", EXIT_DO_NOT_RESTART),
        _FOUR,
        "gives up",
        code=EXIT_DO_NOT_RESTART,
    ),
    Row(
        "the time limit ended two attempts in a row, and nothing was saved between",
        Action.give_up,
        _log(_LIMIT, _LIMIT),
        _FOUR,
        "gives up: a job is too short for a step and its save",
        code=EXIT_DO_NOT_RESTART,
    ),
    Row(
        "the same error before the first step, twice",
        Action.give_up,
        _log(_EARLY, _EARLY),
        _WITH_SPARE,
        "gives up: code or configuration; no node is blamed",
        code=EXIT_DO_NOT_RESTART,
    ),
    Row(
        "the same error at the same step, twice, wherever it was",
        Action.give_up,
        _log(_ERROR, _elsewhere(_ERROR, 150)),
        _WITH_SPARE,
        "gives up: bad data or code; no node is blamed",
        code=EXIT_DO_NOT_RESTART,
    ),
    Row(
        "`recovery.roll_back.max_in_a_row` (3) roll-backs without progress, and the loss is bad again",
        Action.give_up,
        _log(*[replace(_LOSS, step=step) for step in (150, 120, 141, 133)]),
        _WITH_SPARE,
        "gives up",
        code=EXIT_DO_NOT_RESTART,
    ),
    Row(
        "`recovery.max_restarts` (3) restarts in a row without progress",
        Action.give_up,
        _log(*_FOUR_ERRORS),
        _WITH_SPARE,
        "gives up",
        code=EXIT_FAILED,
    ),
    Row(
        f"{MOST_NOT_CHARGED} attempts in a row without progress that are not charged",
        Action.give_up,
        _log(*[_LEADER] * MOST_NOT_CHARGED),
        _WITH_SPARE,
        "gives up",
        code=EXIT_FAILED,
    ),
    Row(
        "a node is lost: no spare, fewer than `recovery.min_nodes`, no other job to follow",
        Action.give_up,
        _log(_NODE),
        replace(_FOUR, hosts=_LEFT, can_requeue=False),
        "gives up",
        code=EXIT_FAILED,
    ),
)

GOES_ON: Sequence[Row] = (
    Row(
        "a rank dies: signal, error, out of memory",
        Action.restart,
        _log(_KILLED),
        _FOUR,
        "restarts in place",
        charged=True,
        wait="none",
    ),
    Row(
        "again, at another step or on another host, without progress",
        Action.restart,
        _log(_KILLED, _elsewhere(_KILLED, 120)),
        _FOUR,
        "restarts in place",
        charged=True,
        wait="10 s, 30 s … 600 s",
    ),
    Row(
        "again, but after progress",
        Action.restart,
        _log(_KILLED, _elsewhere(_KILLED, 120), _KEPT),
        _FOUR,
        "restarts in place; the count begins anew",
        charged=True,
        wait="none",
    ),
    Row(
        "a rank is silent (stopped, locked, looping)",
        Action.restart,
        _log(_HANG),
        _FOUR,
        "killed, restarts in place; its host is noted",
        charged=True,
        wait="none",
    ),
    Row(
        "the loss leaps or is not finite, and the policy is to roll back",
        Action.restart,
        _log(_LOSS),
        _FOUR,
        "restarts from a checkpoint before it, without that data",
        charged=True,
        wait="none",
    ),
    Row(
        "a rank computed a step differently from two others (`recovery.replay_every_steps`)",
        Action.replace,
        _log(replace(_REPLAY, blamed=("node2",))),
        _WITH_SPARE,
        "left out and put on the cluster's list; from the last checkpoint before that",
        wait="none",
    ),
    Row(
        "two ranks computed a step differently, and there is no third one",
        Action.restart,
        _log(_REPLAY),
        _FOUR,
        "restarts from the last checkpoint before that; no host is blamed",
        charged=True,
        wait="none",
    ),
    Row(
        "an agent dies, its node answers",
        Action.restart,
        _log(_AGENT),
        _FOUR,
        "restarts in place; its host is noted",
        charged=True,
        wait="none",
    ),
    Row(
        "a node is lost, and a spare waits",
        Action.replace,
        _log(_NODE),
        replace(_WITH_SPARE, hosts=_LEFT),
        "the spare steps in",
        wait="none",
    ),
    Row(
        "a node is lost, no spare; `recovery.min_nodes` allows fewer",
        Action.shrink,
        _log(_NODE),
        replace(_FOUR, hosts=_LEFT, min_nodes=2),
        "goes on with fewer nodes, the same global batch",
        wait="none",
    ),
    Row(
        "a node is lost, no spare, fewer are not allowed",
        Action.requeue,
        _log(_NODE),
        replace(_FOUR, hosts=_LEFT),
        "another job, without that node",
        wait="none",
    ),
    Row(
        "the same host twice in a row: signal, hang, broken device, agent or node lost",
        Action.replace,
        _log(_HANG, replace(_KILLED, step=120)),
        _WITH_SPARE,
        "left out and put on the cluster's list; a spare, fewer nodes or another job, as above",
        wait="none",
    ),
    Row(
        "the leader and all who could have judged the attempt are gone",
        Action.restart,
        _log(_LEADER),
        _FOUR,
        "restarts",
        wait="none",
    ),
    Row(
        "the time limit comes, or a job of more weight",
        Action.requeue,
        _log(_LIMIT),
        _FOUR,
        "saved; another start of the job (`cluster.requeue`)",
        wait="none",
    ),
)

ROWS: Sequence[Row] = (*GOES_ON, *ENDS)
