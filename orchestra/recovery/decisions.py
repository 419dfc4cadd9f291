"""What the policy is asked and what it answers: values. Which answer follows is `policy`'s to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from conf.schema import RecoveryConfig
from orchestra.recovery.incidents import Incident


class Action(Enum):
    """What follows an attempt."""

    # The same nodes again, in the same allocation.
    restart = "restart"
    # As many nodes, with a spare in the place of each that is left out.
    replace = "replace"
    # Fewer nodes, never fewer than recovery.min_nodes.
    shrink = "shrink"
    # Another start of a job, on other nodes or at another time.
    requeue = "requeue"
    # The run is done, or somebody asked for its end.
    end = "end"
    give_up = "give_up"


@dataclass(frozen=True)
class Resources:
    """What there is to start again with, when an attempt is over."""

    wanted_nodes: int
    # None: all that are wanted.
    min_nodes: int | None
    # Of the attempt's hosts those that are alive, and the ones that wait beside them. Excluded ones left out.
    hosts: tuple[str, ...]
    spares: tuple[str, ...] = ()
    can_requeue: bool = False
    # Whether this allocation lives on.
    in_place: bool = True

    @property
    def fewest_nodes(self) -> int:
        return self.wanted_nodes if self.min_nodes is None else self.min_nodes


@dataclass(frozen=True)
class Rules:
    """The part of `recovery` that the policy knows."""

    # Restarts in a row without progress; 0: never start again after a failure.
    max_restarts: int = 3
    backoff_s: float = 10.0
    # Whether a host that failed twice is left out.
    excludes: bool = True
    # Roll-backs in a row without progress.
    max_roll_backs: int = 3

    @classmethod
    def of(cls, config: RecoveryConfig) -> Rules:
        """Return the rules that a configuration asks for."""
        excludes = config.exclude_hours > 0
        return cls(config.max_restarts, config.backoff_s, excludes, config.roll_back.max_in_a_row)


@dataclass(frozen=True)
class Decision:
    """What is to be done, and why."""

    action: Action
    # What the run ends with where it ends here.
    code: int
    reason: str
    # The rule that decided.
    rule: str = ""
    # Hosts that the next attempt leaves out.
    exclude: tuple[str, ...] = ()
    # Those of them that go onto the cluster's list: they failed twice, or computed something wrong.
    listed: tuple[str, ...] = ()
    wait_s: float = 0.0
    # Whether it counts against recovery.max_restarts.
    charged: bool = False


@dataclass(frozen=True)
class Case:
    """What a rule looks at."""

    # Since a person started the run last, oldest first.
    series: Sequence[Incident]
    # Of these the last ones, without progress between them.
    row: Sequence[Incident]
    resources: Resources
    rules: Rules

    @property
    def now(self) -> Incident:
        return self.row[-1]
