"""Event logs of attempts, as workers and agents write them, and what the policy decides after incidents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestra.recovery import history
from orchestra.recovery.incidents import Incident, incidents
from orchestra.recovery.policy import Decision, Resources, Rules, decide
from orchestra.run.files import Record

HOSTS = ("node1", "node2", "node3", "node4")
FOUR = Resources(wanted_nodes=4, min_nodes=None, hosts=HOSTS, can_requeue=True)

TRACEBACK = """Traceback (most recent call last):
  File "/somewhere/runs/first/code/orchestra/train/worker.py", line 63, in run_rank
    _train(config, ranks, records)
  File "/somewhere/runs/first/code/orchestra/train/step.py", line 41, in run
    loss = model(tokens)
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
    return forward_call(*args)
ValueError: token 70123 at 0x7f12 is out of range
"""


class Log:
    """Events in the order of time, one second apart."""

    def __init__(self) -> None:
        self.events: list[Record] = []

    def write(self, attempt: int, event: str, **evidence: Any) -> Log:
        stamp = {"time": 1000.0 + len(self.events), "attempt": attempt, "event": event, "host": "node1"}
        self.events.append({**stamp, **evidence})
        return self

    def incidents(self, steps: dict[int, int] | None = None) -> list[Incident]:
        """Return what ended each attempt. `steps`: the last logged step of attempts."""
        return incidents(history.read(self.events), steps)

    @property
    def last(self) -> Incident:
        return self.incidents()[-1]

    def start(self, attempt: int, *, nodes: int = 4, job: str | None = "7", trained: bool = True) -> Log:
        """Begin an attempt on node1, node2 …; led from the first."""
        self.write(attempt, "attempt_started", node=0, nodes=nodes, job=job)
        for node in range(1, nodes):
            self.write(attempt, "node_started", node=node, host=f"node{node + 1}")
        return self.write(attempt, "training_started", rank=0) if trained else self

    def fail(self, attempt: int, rank: int = 3, step: int = 150, **evidence: Any) -> Log:
        """Let a rank write that an exception ended it."""
        error = {"code": 1, "cause": "ValueError", "message": "token 70123", "traceback": TRACEBACK}
        place = {"rank": rank, "host": "node2", "step": step}
        return self.write(attempt, "failed", **{**error, **place, **evidence})

    def kill(self, attempt: int, signal: str = "SIGKILL", **evidence: Any) -> Log:
        """Let an agent write that a signal ended a rank."""
        killed = {"rank": 3, "host": "node2", "code": 1, "cause": f"killed by {signal}", "signal": signal}
        return self.write(attempt, "rank_failed", **{**killed, **evidence})

    def end(self, attempt: int, code: int = 1, decision: str | None = "restart", **evidence: Any) -> Log:
        """Let the leader write the verdict, and what was decided."""
        name = "finished" if code == 0 else "failed"
        self.write(attempt, name, node=0, code=code, cause="x", message="", **evidence)
        if decision is not None:
            self.write(attempt, "restarting", decision=decision, rule="start_again", reason="r", exclude=[])
        return self


def in_a_row(*parts: Incident) -> tuple[Incident, ...]:
    """Return incidents of attempts 0, 1 …, of which a person started the first."""
    return tuple(
        replace(part, attempt=number, time=100.0 * number, by_hand=part.by_hand or number == 0)
        for number, part in enumerate(parts)
    )


def after(*parts: Incident, resources: Resources = FOUR, rules: Rules | None = None) -> Decision:
    return decide(in_a_row(*parts), resources, rules or Rules())
