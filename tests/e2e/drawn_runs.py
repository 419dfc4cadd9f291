"""Runs of layouts and models that are drawn at random, hurt at random, and compared with the same left alone.

`python tests/e2e/drawn_runs.py --runs 40` (`make drawn-runs RUNS=40`) prints a line for each. A run is a
function of its number, but for what only time decides: when a signal comes. It is `orchestra run` as a user
types it, hurt by planned faults in any phase, by SIGKILL for one rank or for all, or stopped, and resumed
until it has finished. Then every row and the last checkpoint must be those of a run left alone, bit for bit.
What the rules refuse is passed over; what fails is left in the folder that its line names.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "ranks"))

from commands import assert_same_training, environment, events_of, processes_of, run_of, words  # noqa: E402
from drawn_layouts import draw  # noqa: E402
from kill_points import say  # noqa: E402

from launchers import processes  # noqa: E402
from orchestra.run.metrics_file import read_metrics  # noqa: E402
from orchestra.run.paths import RunDir  # noqa: E402
from tests.support.waiting import eventually  # noqa: E402

STEPS = 12
# Of the standard library's text.
_VOCABULARY = 259
_LIMIT_S, _MOST_RESUMES = 300.0, 6
_REFUSED = 2
_KINDS = (*["sigkill"] * 4, "exit", "segfault", "exception", "hang", "sigstop", "gil", "agent_kill")
_AT_STEPS, _AT_SAVES = ("step", "step", "forward", "reduce"), ("staging", "mid_file", "before_vote")
_OF_COORDINATOR = ("before_manifest", "before_prune")
# So that a signal finds the run at work: about thirty steps a second.
_SLOW = "{at_step: 1, rank: all, fault: slow, seconds: 0.03, attempt: all}"


@dataclass(frozen=True)
class DrawnRun:
    """Run `number`: what is typed, on how many ranks, and how it is hurt."""

    number: int
    world: int
    overrides: tuple[str, ...]
    # "faults", "a rank is killed", "all is killed" or "a signal"; the first has the rest planned.
    blow: str
    inject: str


def drawn_run(number: int) -> DrawnRun:
    """Return run `number`."""
    chance = Random(1_000_003 + number)
    found = draw(chance.randrange(10**6))
    every = chance.choice([2, 3, 4])
    kept = found.kept
    model = replace(kept.model, vocab_size=_VOCABULARY)
    train = replace(kept.train, steps=STEPS, compile=chance.random() < 0.1)
    sections = {"model": model, "parallelism": kept.parallelism, "train": train, "optim": kept.optim}
    overrides = [text for name, part in sections.items() for text in _overrides(name, part)]
    overrides += [f"train.compile={_spelled(train.compile)}", f"precision={kept.precision.name.name}"]
    overrides += [text for text in _overrides("precision", kept.precision) if ".name=" not in text]
    overrides += [f"data.document_masks={_spelled(kept.data.document_masks)}"]
    overrides += _machinery(chance, found.world, every) + _habits(chance, overrides)
    blow = chance.choice(["faults"] * 3 + ["a rank is killed", "all is killed", "a signal"])
    entries = _faults(chance, found.world, every) if blow == "faults" else [_SLOW]
    last = dict(text.split("=", 1) for text in overrides)
    said = tuple(f"{key}={value}" for key, value in last.items())
    return DrawnRun(number, found.world, said, blow, f"recovery.inject=[{', '.join(entries)}]")


def _overrides(section: str, part: Any) -> Iterator[str]:
    """Yield what is to be typed for a section that is not as by default."""
    usual = type(part)()
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from _overrides(f"{section}.{field.name}", value)
        elif value != getattr(usual, field.name):
            yield f"{section}.{field.name}={_spelled(value)}"


def _spelled(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"[{','.join(map(_spelled, value))}]" if isinstance(value, list) else str(value)


def _machinery(chance: Random, world: int, every: int) -> list[str]:
    return [
        *("cluster.device=cpu", "cluster.threads_per_rank=1", "cluster.peak_tflops=1", "wandb.mode=disabled"),
        *(f"cluster.gpus_per_node={world}", f"checkpoint.every_steps={every}", "checkpoint.timeout_s=30"),
        f"checkpoint.async_save={_spelled(chance.random() < 0.6)}",
        f"checkpoint.when_busy={chance.choice(['skip', 'wait'])}",
        f"checkpoint.restore={chance.choice(['broadcast', 'broadcast', 'rank0', 'direct'])}",
        f"checkpoint.keep_last={chance.choice([1, 2, 3])}",
        *("recovery.max_restarts=8", "recovery.backoff_s=0.2", "recovery.heartbeat_timeout_s=20"),
        f"recovery.warm_start={_spelled(chance.random() < 0.7)}",
    ]


def _habits(chance: Random, given: list[str]) -> list[str]:
    """Return what some runs have besides."""
    choices = [
        (0.25, f"recovery.memory_copy_every_steps={chance.choice([1, 2, 3])}"),
        (0.2, "data.ledger=true"),
        (0.2, f"eval.every_steps={chance.choice([2, 5])}"),
        (0.15, "optim.schedule=wsd"),
        (0.15, f"train.noise_scale_every={chance.choice([2, 3])}"),
        (0.1, f"recovery.replay_every_steps={chance.choice([2, 3])}"),
    ]
    found = [text for share, text in choices if chance.random() < share]
    if chance.random() < 0.15 and not any(text.startswith("optim.state_dtype") for text in given):
        folder = f"parallelism.offload_dir={tempfile.gettempdir()}"
        found += ["parallelism.offload=optimizer_disk", folder]
    has_experts = any(text.startswith("parallelism.ep=") for text in given)
    return [*found, "eval.steps=1", *(["parallelism.expert_placement=auto"] * has_experts)]


def _faults(chance: Random, world: int, every: int) -> Iterator[str]:
    """Yield entries of recovery.inject, one for each attempt that is hurt."""
    for attempt in range(chance.choice([1, 1, 2, 3])):
        kind = chance.choice(_KINDS)
        phase = chance.choice(["setup", "restore", *_AT_STEPS, *_AT_SAVES, *_OF_COORDINATOR])
        phase = "setup" if phase == "restore" and attempt == 0 else phase
        rank = chance.choice([*range(world), "all"] if kind == "sigkill" else [*range(world)])
        at = chance.randrange(min(2 + 3 * attempt, STEPS), STEPS + 1)
        at = at if phase in _AT_STEPS else every * chance.randrange(1, STEPS // every + 1)
        where = "" if phase == "setup" else f", at_step: {at}"
        rank = 0 if phase in _OF_COORDINATOR else rank
        yield f"{{attempt: {attempt}, rank: {rank}, fault: {kind}, phase: {phase}{where}}}"


def trained(run: DrawnRun, folder: Path) -> str:
    """Train a run, left alone and hurt; return what became of it. AssertionError where anything is amiss."""
    alone = _ended(folder, "run", "run.name=alone", *run.overrides)
    if alone.returncode == _REFUSED:
        return "refused"
    assert alone.returncode == 0, alone.stdout[-2000:]
    hurt = run_of(folder, "hurt")
    begin = words("run", "run.name=hurt", *run.overrides, run.inject)
    with (folder / "hurt.out").open("w") as output:
        process = subprocess.Popen(
            begin, cwd=folder, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            if run.blow != "faults":
                _strike(run, hurt, process)
            code = process.wait(_LIMIT_S)
        finally:
            # What takes too long does not go on beside the next run.
            process.kill()
    resumes = 0
    while code != 0 and resumes < _MOST_RESUMES:
        resumes += 1
        done = _ended(folder, "resume", "hurt")
        code = done.returncode
        # Others are told to wait until a killed leader is known to be gone.
        time.sleep(3.0 * (code == _REFUSED))
    assert code == 0, (code, resumes, done.stdout[-2000:])
    assert eventually(lambda: not processes_of(hurt), 10), "it left processes"
    assert_same_training(hurt, run_of(folder, "alone"))
    attempts = len(events_of(hurt, "attempt_started"))
    return f"same after {attempts} attempts, {resumes} resumes"


def _ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(*arguments),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def _strike(run: DrawnRun, hurt: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Kill or stop a run that trains, at a random moment."""
    chance = Random(run.number)
    step = chance.randrange(STEPS)
    eventually(lambda: process.poll() is not None or _num_rows(hurt) >= step, _LIMIT_S)
    time.sleep(chance.random() / 2)
    if run.blow == "a signal":
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
        return
    found = [each.pid for each in processes.with_words(str(hurt.path))]
    if run.blow == "all is killed":
        # What its command leaves behind ends by itself.
        found = [process.pid, *found] if chance.random() < 0.7 else [process.pid]
    else:
        found = [pid for pid in found if pid != process.pid]
        found = [chance.choice(found)] if found else []
    for pid in found:
        # It may have ended by now.
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _num_rows(run: RunDir) -> int:
    return len(read_metrics(run)) if run.metrics.exists() else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=None, help="number of the first; default: a random one")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(10**6) if arguments.first is None else arguments.first
    # Whatever else runs here comes first.
    os.nice(10)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ends: Counter[str] = Counter()
    place = Path(tempfile.mkdtemp(prefix="drawn-runs-"))
    for number in range(first, first + arguments.runs):
        run, folder, began = drawn_run(number), place / str(number), time.monotonic()
        folder.mkdir()
        try:
            found = trained(run, folder)
            shutil.rmtree(folder)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            found = f"FAILED in {folder}: {error}"
            (folder / "typed").write_text("\n".join([*run.overrides, run.inject]))
        ends[found.partition(" ")[0]] += 1
        seconds = time.monotonic() - began
        say(f"run {number}  {run.world} ranks, {run.blow}: {found}  {seconds:.0f} s")
    say(", ".join(f"{count} {what}" for what, count in ends.items()))
    return int("FAILED" in ends)


if __name__ == "__main__":
    sys.exit(main())
