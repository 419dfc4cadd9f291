"""What a run that goes on will do otherwise than before: changed keys, the learning rate, the tokens left."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from orchestra.config.keys import shown
from orchestra.errors import ConfigError
from orchestra.optim.schedule import learning_rate
from orchestra.sizes.topology import global_batch_size, layout

# A rate that grows or shrinks more than this between two steps is no schedule's own doing, but for a warm-up.
_MAX_JUMP = 1.5


@dataclass(frozen=True)
class ResumeChanges:
    """How a run of `before` goes on as `now` after `step` (None: from the beginning).

    `keys`: those that change, with their old and new values as they are written. `rates`: the learning rates
    of the next step, as it was to be and as it will be; None where nothing is left to train.
    """

    before: Config
    now: Config
    step: int | None

    @property
    def keys(self) -> dict[str, tuple[str, str]]:
        old, new = dict(_leaves(self.before)), dict(_leaves(self.now))
        pairs = {name: (shown(old[name]), shown(value)) for name, value in new.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def rates(self) -> tuple[float, float] | None:
        begin = self.step or 0
        if begin >= self.now.train.steps:
            return None
        was = learning_rate(self.before.optim, self.before.train, min(begin + 1, self.before.train.steps))
        return was, learning_rate(self.now.optim, self.now.train, begin + 1)

    @property
    def tokens_left(self) -> int:
        """Tokens from `step` to the end, with the new batches."""
        train, cluster = self.now.train, self.now.cluster
        mesh = layout(self.now.parallelism, cluster.nodes * int(cluster.gpus_per_node))
        each = global_batch_size(train, mesh.dp) * train.seq_len
        return max(0, train.steps - (self.step or 0)) * each

    def refuse_jump(self, accepted: bool) -> None:
        """Raise ConfigError where a schedule would let the rate jump that nobody asked for by `optim.lr`."""
        rates = self.rates
        if accepted or not self.step or rates is None or self.before.optim.lr != self.now.optim.lr:
            return
        was, becomes = rates
        if was / _MAX_JUMP <= becomes <= was * _MAX_JUMP:
            return
        of_schedule = [f"{name}={new}" for name, (_, new) in self.keys.items() if _moves_schedule(name)]
        raise ConfigError(
            f"{' '.join(of_schedule)}: the learning rate would jump at step {self.step + 1}, "
            f"{_arrow(rates)} ({self.now.optim.schedule.value} over {self.now.train.steps} steps); keep it "
            f"with `optim.schedule=constant optim.lr={was:.3g}`, or accept the jump with --accept-jump"
        )

    def lines(self) -> list[str]:
        """Return what a person should see before the run goes on; nothing where nothing changes."""
        if not self.keys:
            return []
        lines = [f"changed {name}: {old} → {new}" for name, (old, new) in self.keys.items()]
        if (rates := self.rates) is not None and (rates[0] != rates[1]):
            lines.append(f"        learning rate at step {(self.step or 0) + 1}: {_arrow(rates)}")
        return [*lines, f"        {self.tokens_left:,} tokens left"]

    def facts(self) -> dict[str, Any]:
        """Return the same for --json."""
        rates = self.rates
        return {
            "changed": {name: list(pair) for name, pair in self.keys.items()},
            "learning_rate": None if rates is None else {"before": rates[0], "now": rates[1]},
            "tokens_left": self.tokens_left,
        }


def _arrow(rates: tuple[float, float]) -> str:
    return f"{rates[0]:.3g} → {rates[1]:.3g}"


def _moves_schedule(name: str) -> bool:
    return name.startswith("optim.") or name in ("train.steps", "train.tokens")


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, enum.Enum):
            yield from _leaves(value, f"{name}.")
        elif isinstance(value, list) and any(dataclasses.is_dataclass(each) for each in value):
            yield name, [dataclasses.asdict(each) for each in value]
        else:
            yield name, value
