"""The policy as a table: situations, each with an example of a log, and what is decided then.

What users read (docs/recovery.md) and what is tested are the same rows. Run as a program it prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from incident_logs import FOUR, HOSTS, after

from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.recovery.incidents import Incident, Kind
from orchestra.recovery.policy import MOST_NOT_CHARGED, Action, Decision, Resources
from orchestra.run.rollback import BROKEN_DEVICE, SPIKE, RollBack

# The examples: a run on four nodes that saved step 100 and reached step 150.

_WITH_SPARE = replace(FOUR, spares=("node5",))
_LEFT = replace(FOUR, hosts=HOSTS[:1] + HOSTS[2:])

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
_BROKEN = replace(_ERROR, unfit=("node2",), of_device=True)
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
_OUTAGE = replace(_EARLY, kind=Kind.storage, cause="the storage did not answer")


def _at(step: int, incident: Incident, host: str = "node3") -> Incident:
    """Return the same at another step, on another host."""
    return replace(incident, step=step, host=host, blamed=(host,) if incident.blamed else ())


def _asked(kind: Kind, cause: str, code: int) -> Incident:
    return replace(_ERROR, kind=kind, cause=cause, code=code)


_KEPT = replace(_at(350, _KILLED, "node4"), committed=300)
_STEPS = (150, 120, 141, 133)


@dataclass(frozen=True)
class Row:
    """One situation. `code` is None where the run goes on."""

    situation: str
    # What happens, in a few words.
    answer: str
    action: Action
    # Of attempts 0, 1, 2 …, the first one started by a person.
    incidents: tuple[Incident, ...]
    resources: Resources = FOUR
    code: int | None = None
    charged: bool = False
    wait: str = ""

    def decision(self) -> Decision:
        """Return what the policy decides in the example, under the default rules."""
        return after(*self.incidents, resources=self.resources)


def markdown() -> str:
    """Return the table as docs/recovery.md shows it."""
    head = "| what happened | what follows | charged | wait | exit code | rule |\n|---|---|---|---|---|---|\n"
    return head + "".join(_line(row) for row in ROWS)


def _line(row: Row) -> str:
    code = "" if row.code is None else str(row.code)
    charged = "yes" if row.charged else ""
    cells = (row.situation, row.answer, charged, row.wait, code, f"`{row.decision().rule}`")
    return f"| {' | '.join(cells)} |\n"


def _ends(situation: str, answer: str, code: int, incident: Incident) -> Row:
    return Row(situation, answer, Action.end, (incident,), code=code)


def _gives_up(
    situation: str, why: str, code: int, *incidents: Incident, resources: Resources = _WITH_SPARE
) -> Row:
    answer = f"gives up: {why}" if why else "gives up"
    return Row(situation, answer, Action.give_up, incidents, resources, code)


def _restarts(situation: str, answer: str, *incidents: Incident, wait: str = "none") -> Row:
    return Row(situation, answer, Action.restart, incidents, charged=True, wait=wait)


def _moves(situation: str, answer: str, action: Action, resources: Resources, *incidents: Incident) -> Row:
    return Row(situation, answer, action, incidents, resources, wait="none")


ROWS: Sequence[Row] = (
    _restarts("a rank dies: signal, error, out of memory", "restarts in place", _KILLED),
    _restarts(
        "again, at another step or on another host, without progress",
        "restarts in place",
        *(_KILLED, _at(120, _KILLED)),
        wait="10 s, 30 s … 600 s",
    ),
    _restarts(
        "again, but after progress",
        "restarts in place; the count begins anew",
        *(_KILLED, _at(120, _KILLED), _KEPT),
    ),
    _restarts(
        "a rank is silent (stopped, locked, looping)", "killed, restarts in place; its host is noted", _HANG
    ),
    _restarts(
        "the loss leaps or is not finite, and the policy is to roll back",
        "restarts from a checkpoint before it, without that data",
        _LOSS,
    ),
    _moves(
        "a rank computed a step differently from two others (`recovery.replay_every_steps`)",
        "left out and put on the cluster's list; from the last checkpoint before that",
        *(Action.replace, _WITH_SPARE, replace(_REPLAY, blamed=("node2",))),
    ),
    _restarts(
        "two ranks computed a step differently, and there is no third one",
        "restarts from the last checkpoint before that; no host is blamed",
        _REPLAY,
    ),
    _restarts("an agent dies, its node answers", "restarts in place; its host is noted", _AGENT),
    _moves(
        "a node is lost, and a spare waits",
        "the spare steps in",
        *(Action.replace, replace(_LEFT, spares=("node5",)), _NODE),
    ),
    _moves(
        "a node is lost, no spare; `recovery.min_nodes` allows fewer",
        "goes on with fewer nodes, the same global batch",
        *(Action.shrink, replace(_LEFT, min_nodes=2), _NODE),
    ),
    _moves(
        "a node is lost, no spare, fewer are not allowed",
        "another job, without that node",
        *(Action.requeue, _LEFT, _NODE),
    ),
    _moves(
        "an error, and the check of a node then finds that it cannot train (`recovery.preflight`)",
        "left out; a spare, fewer nodes or another job, as above",
        *(Action.replace, replace(_LEFT, spares=("node5",)), replace(_ERROR, unfit=("node2",))),
    ),
    _moves(
        "the same error at the same step, twice, and each time a node's check finds a broken device",
        "as above: neither code nor data is suspected",
        *(Action.replace, replace(_LEFT, spares=("node5",)), _BROKEN, _BROKEN),
    ),
    _moves(
        "the same host twice in a row: signal, hang, broken device, agent or node lost",
        "left out and put on the cluster's list; a spare, fewer nodes or another job, as above",
        *(Action.replace, _WITH_SPARE, _HANG, replace(_KILLED, step=120)),
    ),
    _moves(
        "the leader and all who could have judged the attempt are gone",
        "restarts",
        *(Action.restart, FOUR, _LEADER),
    ),
    _moves(
        "a storage does not answer for `checkpoint.restore_patience_s`",
        "restarts, and waits for it again",
        *(Action.restart, FOUR, _OUTAGE),
    ),
    _moves(
        "the time limit comes, or a job of more weight",
        "saved; another start of the job (`cluster.requeue`)",
        *(Action.requeue, FOUR, _LIMIT),
    ),
    _ends("the last step was trained", "done", EXIT_DONE, _asked(Kind.finished, "finished", EXIT_DONE)),
    _ends(
        "stopped on request: `orchestra cancel`, SIGTERM, Ctrl-C",
        "saved and ended; `orchestra resume` goes on",
        EXIT_STOPPED,
        _asked(Kind.stopped, "cancel", EXIT_STOPPED),
    ),
    _ends(
        "a second signal (Ctrl-C twice), `orchestra cancel --now`",
        "ended at once",
        EXIT_INTERRUPTED,
        _asked(Kind.stopped, "asked to stop", EXIT_INTERRUPTED),
    ),
    _gives_up(
        "a rank says that starting again would not help: non-finite loss that stays, foreign checkpoints",
        "",
        EXIT_DO_NOT_RESTART,
        _asked(Kind.refused, "NonFiniteError in train/loop.py:train", EXIT_DO_NOT_RESTART),
    ),
    _gives_up(
        "the time limit ended two attempts in a row, and neither saved a step",
        "a job is too short for a step and its save",
        EXIT_DO_NOT_RESTART,
        *(_LIMIT, _LIMIT),
    ),
    _gives_up(
        "the same error before the first step, twice",
        "code or configuration; no node is blamed",
        EXIT_DO_NOT_RESTART,
        *(_EARLY, _EARLY),
    ),
    _gives_up(
        "the same error at the same step, twice, wherever it was",
        "bad data or code; no node is blamed",
        EXIT_DO_NOT_RESTART,
        *(_ERROR, _at(150, _ERROR)),
    ),
    _gives_up(
        "`recovery.roll_back.max_in_a_row` (3) roll-backs without progress, and the loss is bad again",
        "",
        EXIT_DO_NOT_RESTART,
        *(replace(_LOSS, step=step) for step in _STEPS),
    ),
    _gives_up(
        "`recovery.max_restarts` (3) restarts in a row without progress",
        "",
        EXIT_FAILED,
        *(replace(_ERROR, step=step) for step in _STEPS),
    ),
    _gives_up(
        f"{MOST_NOT_CHARGED} attempts in a row without progress that are not charged, preempted ones not "
        "counted",
        "",
        EXIT_FAILED,
        *[_LEADER] * MOST_NOT_CHARGED,
    ),
    _gives_up(
        "a node is lost: no spare, fewer than `recovery.min_nodes`, no other job to follow",
        "",
        EXIT_FAILED,
        _NODE,
        resources=replace(_LEFT, can_requeue=False),
    ),
)

if __name__ == "__main__":
    sys.stdout.write(markdown())
