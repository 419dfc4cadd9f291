"""What a run that goes on will do otherwise than before: changed keys, the learning rate, the tokens left."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from conf.schema import Config
from orchestra.config.keys import known_keys, shown
from orchestra.config.machine import tokens_per_step
from orchestra.errors import ConfigError
from orchestra.optim.schedule import batch_factor, learning_rate
from orchestra.run.events import is_number
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import batch_ramp, warmup_steps

# A rate that grows or shrinks more than this between two steps is no schedule's own doing, but for a warm-up.
_MAX_JUMP = 1.5
# Beside all of `optim`: with a ramp the rate follows the batches, which are given in tokens.
_OF_SCHEDULE = ("train.steps", "train.tokens", "train.batch_ramp", "train.seq_len")


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
        names = (name for name, key in known_keys().items() if not key.is_section)
        pairs = {name: (_written(self.before, name), _written(self.now, name)) for name in names}
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
        train, begin = self.now.train, self.step or 0
        if tokens_per_step(self.now) is None or begin >= train.steps:
            return 0
        through = batch_ramp(train).sequences_through
        return (through(train.steps) - through(begin)) * train.seq_len

    def refuse_other_past(self, run: RunDir) -> None:
        """Raise ConfigError where a new ramp would give the steps that were trained other batches than they
        had: the rate and the end of the run follow from their tokens. What they had is in the run's rows, and
        of steps since the last one the configuration before says it.
        """
        before, now = (batch_ramp(config.train) for config in (self.before, self.now))
        has_ramp = self.before.train.batch_ramp or self.now.train.batch_ramp
        if not self.step or not has_ramp or before == now:
            return
        trained = {
            row["step"]: row["tokens"]
            for row in read_metrics(run)
            if row["step"] <= self.step and is_number(row.get("tokens"))
        }
        seq_len, steps = self.now.train.seq_len, sorted(trained)
        last = max(steps, default=0)
        since = (before.sequences_through(self.step) - before.sequences_through(last)) * seq_len
        if not self.before.train.batch_ramp and len(steps) > 1:
            # A batch that nobody gave follows from the ranks there were.
            since = (trained[last] - trained[steps[-2]]) * (self.step - last) // (last - steps[-2])
        trained[self.step] = trained.get(last, 0) + since
        for step, was in trained.items():
            if was != (becomes := now.sequences_through(step) * seq_len):
                raise ConfigError(
                    f"train.batch_ramp: steps 1 to {step} were trained on {was:,} tokens, not on the "
                    f"{becomes:,} of the new one; keep the batches up to step {self.step}, and change those "
                    f"that begin at tokens: {trained[self.step]} or later"
                )

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
            f"{_arrow(rates)} ({self.now.optim.schedule.value} over {self.now.train.steps} steps); "
            f"{self._how_to_keep(was)}, or accept the jump with --accept-jump"
        )

    def _how_to_keep(self, was: float) -> str:
        """Return which values let the next step train at the rate `was`, and those after it too."""
        step, optim, train = self.step or 0, self.now.optim, self.now.train
        if was <= 0:
            return "it was to be 0, which no run can keep: give one that it is to have with `optim.lr`"
        rate = f"{was / batch_factor(optim, train, step + 1):.6g}"
        words = ["optim.schedule=constant", f"optim.lr={rate}"]
        if warmup_steps(optim, train) > step:
            # More steps have a longer warm-up, which the next one would lie in again.
            words.append(
                f"optim.warmup_steps={min(warmup_steps(self.before.optim, self.before.train), step)}"
            )
        if optim.min_lr is not None and optim.min_lr > float(rate):
            words.append("optim.min_lr=null")
        return f"keep it with `{' '.join(words)}`"

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
    return name.startswith("optim.") or name in _OF_SCHEDULE


def _written(config: Config, name: str) -> str:
    value = attrgetter(name)(config)
    if isinstance(value, list):
        value = [dataclasses.asdict(each) if dataclasses.is_dataclass(each) else each for each in value]  # type: ignore[arg-type]
    return shown(value)
