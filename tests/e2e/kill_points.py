"""A run that is killed again and again, at every phase of a save and a restore, and continued each time.

`python tests/e2e/kill_points.py --kills 200` (`make torture KILLS=200`) prints a line for each kill. All
follows from the seed but for what only time decides: how far a save has come when a step kills its rank.
After each kill the newest checkpoint must verify, be no older and no newer than the plan allows, and be where
the next attempt goes on; in the end parameters, optimizer state and every loss must be those of a run left
alone.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import (
    START_S,
    TINY,
    assert_same_training,
    events_of,
    newest_manifest,
    orchestra,
    processes_of,
    run_of,
    start,
    train,
    trained_rows,
)

from checkpointing.catalog import committed_steps
from checkpointing.storage import open_storage
from checkpointing.verify import verify
from orchestra.run.paths import RunDir
from tests.support.waiting import eventually

# Each comes once in every block of kills. `anytime`: the command itself, from outside, at a random moment.
PHASES = (
    "step",
    "staging",
    "mid_file",
    "before_vote",
    "before_manifest",
    "before_prune",
    "restore",
    "anytime",
)
_OF_COORDINATOR = ("before_manifest", "before_prune")
_EVERY = 3
_LATEST_BLOW_S = 8.0


@dataclass(frozen=True)
class Kill:
    """One kill: in `attempt`, of `rank` (a number, `all` or the `command`), at a phase of the save number
    `saves` of that attempt, or so many steps before it is due.
    """

    attempt: int
    phase: str
    rank: str
    saves: int
    offset: int
    delay_s: float

    def at_step(self, newest: int) -> int:
        """Return the step that it strikes at, when the attempt goes on from step `newest`."""
        if self.phase == "restore":
            return newest
        due = newest + self.saves * _EVERY
        return due - self.offset if self.phase in ("step", "anytime") else due

    def fault(self, newest: int) -> str:
        """Return the entry of recovery.inject. Whom the blow from outside misses ends at a step."""
        rank, phase = ("all", "step") if self.phase == "anytime" else (self.rank, self.phase)
        step = self.at_step(newest)
        return f"{{attempt: {self.attempt}, at_step: {step}, rank: {rank}, phase: {phase}}}"

    def newest_allowed(self, newest: int) -> int:
        """Return the newest step that may be committed afterwards: `before_prune` alone is after a commit."""
        if self.phase == "restore":
            return newest
        return self.at_step(newest) - (self.phase != "before_prune")

    def oldest_allowed(self, newest: int) -> int:
        """Return the oldest step that may be the newest checkpoint afterwards."""
        if self.phase in ("restore", "anytime"):
            return newest
        if self.phase == "before_prune":
            return self.at_step(newest)
        # With when_busy=wait a save begins when the one before is committed; the last may be in flight.
        in_flight = 2 if self.phase == "step" else 1
        return max(newest, newest + (self.saves - in_flight) * _EVERY)

    def shown(self, newest: int) -> str:
        """Return who is killed, where and when."""
        when = f"after {self.delay_s:.1f} s" if self.phase == "anytime" else f"of step {self.at_step(newest)}"
        return f"{self.rank} at {self.phase} {when}"


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def planned_kills(count: int, seed: int) -> list[Kill]:
    """Return the kills that follow from a seed: every phase once in each block, in an order of its own."""
    chance = random.Random(seed)
    phases: list[str] = []
    while len(phases) < count:
        # Where nothing is committed yet, there is nothing to restore.
        first = [] if phases else ["before_prune"]
        others = [phase for phase in PHASES if phase not in first]
        phases += [*first, *chance.sample(others, len(others))]
    return [_kill(attempt, phase, chance) for attempt, phase in enumerate(phases[:count])]


def _kill(attempt: int, phase: str, chance: random.Random) -> Kill:
    ranks = ["0", "all"] if phase in _OF_COORDINATOR else ["0", "1", "all"]
    return Kill(
        attempt=attempt,
        phase=phase,
        rank="command" if phase == "anytime" else chance.choice(ranks),
        saves=chance.choice([1, 2]),
        offset=chance.randrange(_EVERY),
        delay_s=chance.uniform(0.0, _LATEST_BLOW_S),
    )


def steps_for(kills: list[Kill]) -> int:
    """Return steps enough that no attempt reaches the end before it is killed."""
    return (sum(kill.saves for kill in kills) + 3) * _EVERY


def train_alone(folder: Path, name: str, steps: int) -> RunDir:
    """Train the same run without a kill."""
    return train(folder, name, *_settings(steps), limit_s=600)


def _settings(steps: int) -> tuple[str, ...]:
    saving = (f"checkpoint.every_steps={_EVERY}", "checkpoint.when_busy=wait", "checkpoint.keep_last=2")
    # Each kill is looked at by itself: whoever starts again is this file.
    return (*TINY, f"train.steps={steps}", *saving, "recovery.max_restarts=0")


class Torture:
    """One run directory and its chain of killed attempts. AssertionError where anything is amiss."""

    def __init__(self, folder: Path, kills: list[Kill]) -> None:
        self.run = run_of(folder, "tortured")
        self.kills = kills
        self.steps = steps_for(kills)
        self._folder = folder

    def newest(self) -> int:
        """Return the step of the newest checkpoint, 0 where there is none."""
        return max(committed_steps(open_storage(self.run.checkpoints)), default=0)

    def kill_all(self) -> None:
        """Start and kill each attempt, and check what it left."""
        for kill in self.kills:
            before, began = self.newest(), time.monotonic()
            (self._blow if kill.phase == "anytime" else self._fault)(kill, before)
            after = self._check(kill, before)
            say(
                f"kill {kill.attempt + 1:>3}/{len(self.kills)}  {kill.shown(before):<40} "
                f"newest {before:>4} → {after:>4}, intact  {time.monotonic() - began:5.1f} s"
            )

    def _fault(self, kill: Kill, before: int) -> None:
        done = orchestra(self._folder, *self._words(kill, before), code=1)
        failed = events_of(self.run, "rank_failed", kill.attempt)
        assert "SIGKILL" in [event.get("signal") for event in failed], (kill, done.stdout, done.stderr)

    def _blow(self, kill: Kill, before: int) -> None:
        """Kill the command from outside: every rank must go with it."""
        started = start(self._folder, "tortured", *self._words(kill, before))

        # On a busy machine the attempt may come to its planned end before anybody has seen it begin.
        def has_begun() -> bool:
            began = events_of(self.run, "attempt_started", kill.attempt)
            return bool(began) or started.process.poll() is not None

        assert eventually(has_begun, START_S), "the attempt has not begun"
        time.sleep(kill.delay_s)
        started.process.kill()
        started.process.communicate()
        assert eventually(lambda: not processes_of(self.run), 10), "ranks outlived their command"

    def _words(self, kill: Kill, before: int) -> tuple[str, ...]:
        inject = f"recovery.inject=[{kill.fault(before)}]"
        if kill.attempt == 0:
            return ("run", "run.name=tortured", *_settings(self.steps), inject)
        return ("resume", "tortured", inject)

    def _check(self, kill: Kill, before: int) -> int:
        assert processes_of(self.run) == [], kill
        after = self.newest()
        if after:
            report = verify(open_storage(self.run.checkpoints), after, num_threads=2)
            assert report.is_intact, (kill, report)
        assert kill.oldest_allowed(before) <= after <= kill.newest_allowed(before), (kill, before, after)
        # An attempt that came so far must have gone on from the newest checkpoint, and from no other.
        for event in events_of(self.run, "restored", kill.attempt):
            assert (event["step"], event["skipped"]) == (before, []), event
        return after

    def finish(self) -> None:
        """Train to the end without a kill."""
        before = self.newest()
        orchestra(self._folder, "resume", "tortured", "recovery.inject=[]", limit_s=600)
        (restored,) = events_of(self.run, "restored", len(self.kills))
        assert (restored["step"], restored["skipped"]) == (before, [])
        assert processes_of(self.run) == []

    def compare(self, alone: RunDir) -> None:
        """Compare what was trained with a run left alone: the state's digest and every row, bit for bit."""
        assert_same_training(self.run, alone)
        assert newest_manifest(alone.checkpoints).step == len(trained_rows(alone)) == self.steps


def _summary(kills: list[Kill], seconds: float) -> Iterator[str]:
    counts = Counter(kill.phase for kill in kills)
    yield ", ".join(f"{phase} {counts[phase]}" for phase in PHASES)
    yield f"{len(kills)} kills in {seconds:.0f} s: the newest checkpoint was intact after each"
    yield "parameters, optimizer state and every loss equal those of a run left alone, bit for bit"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    kills = planned_kills(arguments.kills, seed)
    # Whatever else runs here comes first.
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        torture = Torture(Path(folder), kills)
        say(f"seed {seed}, {len(kills)} kills, {torture.steps} steps, a save every {_EVERY}")
        began = time.monotonic()
        alone = train_alone(Path(folder), "alone", torture.steps)
        torture.kill_all()
        torture.finish()
        torture.compare(alone)
        for line in _summary(kills, time.monotonic() - began):
            say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
