"""What a check is and what it finds; runs many of them, each within its time, whatever they do.

Standard library only: it has to work where nothing else does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Mark(Enum):
    """How good a finding is; only `failed` makes the whole fail."""

    ok = "ok"
    note = "note"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the checklist: what was looked at, what was found, and what to do about it."""

    name: str
    mark: Mark
    found: str
    advice: str = ""


def graded(name: str, found: str, *, is_bad: bool, advice: str, mark: Mark = Mark.warning) -> Finding:
    """Return a finding that is ok, or has `mark` and `advice` where `is_bad`."""
    return Finding(name, mark, found, advice) if is_bad else Finding(name, Mark.ok, found)


@dataclass(frozen=True)
class Subject:
    """What the configuration says that checks depend on; plain values, so that no check needs the schema."""

    # `local` or `slurm`.
    launcher: str = "local"
    # Whether Slurm was asked for; where its commands merely lie about it may be missing.
    needs_slurm: bool = False
    run_dir: Path = Path("runs")
    # checkpoint.fallback_dir, and whether checkpoints have a place of their own (checkpoint.dir).
    fallback_dir: str | None = None
    own_checkpoints: bool = False
    # The Unix group that may write there, beside the user.
    group: str | None = None
    interface: str | None = None
    device: str = "auto"
    ranks_per_node: int | None = None
    # cluster.numa_binding and cluster.threads_per_rank.
    numa_binding: str = "auto"
    threads_per_rank: int | None = None
    wandb_mode: str = "offline"
    partition: str | None = None
    # Options of sbatch and srun by their long names.
    slurm_options: tuple[tuple[str, object], ...] = ()
    setup: tuple[str, ...] = ()
    # Ranks see an image's Python and libraries, not the nodes'.
    in_container: bool = False


@dataclass(frozen=True)
class Check:
    """A name, and a function that returns what it finds under this name or others."""

    name: str
    look: Callable[[Subject], Iterable[Finding]]
    limit_s: float = 30.0


def perform(checks: Sequence[Check], subject: Subject) -> Iterator[Finding]:
    """Run all checks at once and yield their findings in the checks' order.

    A check that raises anything, or has not answered within its time (a dead file server never does), is a
    failure of that check.
    """
    begin = time.monotonic()
    answers: list[list[Finding]] = [[] for _ in checks]
    threads = []
    for check, answer in zip(checks, answers, strict=True):
        thread = threading.Thread(target=_look, args=(check, subject, answer), daemon=True)
        thread.start()
        threads.append(thread)
    for check, answer, thread in zip(checks, answers, threads, strict=True):
        thread.join(max(0.0, check.limit_s - (time.monotonic() - begin)))
        if thread.is_alive():
            stuck = "something that it looks at hangs, such as a file system or a server"
            yield Finding(check.name, Mark.failed, f"no answer within {check.limit_s:g} s", stuck)
        else:
            yield from answer


def _look(check: Check, subject: Subject, answer: list[Finding]) -> None:
    try:
        answer.extend(check.look(subject))
    except BaseException as error:  # noqa: BLE001  a check that breaks is a finding
        problem = f"the check itself failed: {type(error).__name__}: {error}"
        answer.append(Finding(check.name, Mark.failed, problem))


def bounded(act: Callable[[], object], limit_s: float) -> tuple[object, float] | None:
    """Return what `act` returned and the seconds it took; None where it had not ended by then.

    Look-ups of names know no time-out of their own. Raises what `act` raised.
    """
    results: list[object] = []
    errors: list[BaseException] = []
    begin = time.perf_counter()

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    seconds = time.perf_counter() - begin
    if errors:
        raise errors[0]
    return (results[0], seconds) if results else None
