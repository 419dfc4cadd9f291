"""A rehearsal judged: each fault with what answered it, each claim about the end. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.events import read_events
from orchestra.faults import planned_faults
from orchestra.frozen import read_config
from orchestra.jsonl import Record, read_json_lines
from orchestra.rehearsal.oracle import Check, checks
from orchestra.rehearsal.pair import Pair
from orchestra.rehearsal.recoveries import Recovery, recoveries


@dataclass(frozen=True)
class Judgement:
    """What a rehearsal showed."""

    pair: Pair
    recoveries: tuple[Recovery, ...]
    checks: tuple[Check, ...]

    @property
    def is_passed(self) -> bool:
        return all(it.is_passed for it in self.recoveries) and all(
            it.is_true is not False for it in self.checks
        )

    @property
    def code(self) -> int:
        """What the command ends with."""
        return EXIT_DONE if self.is_passed else EXIT_FAILED

    def to_json(self) -> Record:
        """Return it for `--json`."""
        pair = self.pair
        runs = {"undisturbed": str(pair.undisturbed.path), "faults": str(pair.hurt.path)}
        told = {"faults": [it.to_json() for it in self.recoveries]}
        held = {"checks": [it.to_json() for it in self.checks]}
        return {"of": pair.of, "runs": runs, **told, **held, "passed": self.is_passed}


def judged(pair: Pair) -> Judgement:
    """Judge a rehearsal whose two runs are over. Reads every byte of the newest checkpoint.

    Raises ConfigError where a run's configuration cannot be read.
    """
    faults = planned_faults(read_config(pair.hurt.config).recovery.inject)
    rows = list(read_json_lines(pair.hurt.metrics))
    found = recoveries(faults, read_events(pair.hurt), rows)
    return Judgement(pair, tuple(found), tuple(checks(pair.hurt, pair.undisturbed)))
