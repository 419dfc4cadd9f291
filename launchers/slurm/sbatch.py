"""Hands batch scripts to Slurm, each once, and cancels jobs.

A job whose answer was lost is found again by its token. Slurm copies a script when it accepts it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import LauncherError, SlurmRefused, SlurmSilent
from launchers.slurm.commands import both_outputs_of, output_of
from launchers.slurm.queue import find_by_token, job_and_tasks, joined

_SUBMIT_TIMEOUT_S = 60.0
# A controller that was too busy to answer may still accept what it was sent.
_LOOK_AGAIN_S = (0.0, 2.0, 5.0, 10.0)
_ESTIMATE = re.compile(
    r"to start at (?P<time>\S+) using (?P<processors>\d+) processors on nodes (?P<nodes>\S+)"
)

# Options of srun that every script has, the one of them whose value is a word of its own, and what srun adds
# to each complaint.
_ALWAYS = frozenset({"--unbuffered", "--open-mode", "--export", "--no-kill", "--kill-on-bad-exit", "--wait"})
_LOG = re.compile(r" --output (?:'[^']*'|\S)+")
_MORE = re.compile(r'; Try "srun --help" for more information$')

# The line with a job's id, and after a semicolon the cluster's name.
_ID = re.compile(r"^\s*(\d+)(?:;\S*)?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Estimate:
    """What Slurm expects of a job that it would accept: local time of its start, and the nodes."""

    start: str
    nodes: str


def tested(script: str) -> Estimate | None:
    """Ask Slurm whether it would accept a script, without submitting it; None where it gives no estimate.

    Raises SlurmRefused with its reason, SlurmSilent and SlurmMissing.
    """
    _, answer = both_outputs_of(("sbatch", "--test-only"), stdin=script)
    match = _ESTIMATE.search(answer)
    if "\n#SBATCH --hold\n" in script:
        # Slurm reckons as if somebody released it at once.
        return None
    return Estimate(match["time"], match["nodes"]) if match else None


def srun_refuses(script: str) -> str | None:
    """Return what this machine's srun says against the words that a configuration gives it in `script`; None
    where it takes them, is not here or does not answer. sbatch reads none of them.
    """
    line = next((line for line in script.splitlines() if line.startswith("srun ")), "srun")
    # What follows the options is a program with words of its own.
    options = itertools.takewhile(lambda word: word.startswith("--"), shlex.split(_LOG.sub("", line))[1:])
    given = [option for option in options if option.partition("=")[0] not in _ALWAYS]
    if not given:
        return None
    try:
        # It reads all options, and starts nothing.
        output_of(("srun", *given, "--version"))
    except SlurmRefused as error:
        # Named by us and by itself.
        return _MORE.sub("", re.sub("^(srun: )+", "", str(error)))
    except LauncherError:
        # What sbatch has said of the job holds all the same.
        return None
    return None


def has_option(name: str) -> bool:
    """Tell whether this machine's sbatch knows a long option. Raises SlurmMissing and SlurmSilent."""
    return re.search(rf"--{name}\b", output_of(("sbatch", "--help"))) is not None


def submit(script: Path, token: str, options: Sequence[str] = ()) -> str:
    """Submit a script whose comment holds `token`, and return the job's id.

    `options` are further words for sbatch, stronger than the script's own: a script is submitted again with
    `--comment=TOKEN` and `--array=3,7`. Whatever else than an id sbatch answers, the queue is searched for
    the token: a site's wrapper or a dying command may complain of a job that Slurm has. Raises SlurmRefused
    when Slurm said no and has no such job, and SlurmSilent when it stays unknown whether there is one.
    """
    words = ("sbatch", "--parsable", *options, str(script))
    try:
        answer = output_of(words, timeout_s=_SUBMIT_TIMEOUT_S)
        # A site's wrapper may print more, before it and after.
        if ids := _ID.findall(answer):
            return str(ids[-1])
        problem: SlurmRefused | SlurmSilent = SlurmSilent("sbatch printed no job id")
    except (SlurmRefused, SlurmSilent) as error:
        problem = error
    job = _found_later(token, problem)
    if job is not None:
        return job
    if isinstance(problem, SlurmRefused):
        raise problem
    raise SlurmRefused(f"{problem}; the queue holds no such job") from problem


def begin_of_next(script: Path, delay_s: int) -> list[str]:
    """Return sbatch's words for when a job begins that goes on for another one, with the script of that: in
    so many seconds, and not when the script says, which was meant of the first.
    """
    if delay_s > 0:
        return [f"--begin=now+{delay_s}"]
    return ["--begin=now"] if _says(script, "begin") else []


def release(script: Path, job: str) -> None:
    """Let such a job begin where the script asks to be held. A Slurm that does not do it leaves it held."""
    if _says(script, "hold"):
        with contextlib.suppress(LauncherError):
            output_of(("scontrol", "release", job))


def _says(script: Path, option: str) -> bool:
    try:
        return re.search(rf"^#SBATCH --{option}\b", script.read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def _found_later(token: str, problem: LauncherError) -> str | None:
    """Look for the job, after silence several times; None when Slurm answered last and did not have it.

    Raises SlurmSilent where the queue cannot be looked into: nothing may be concluded from that.
    """
    last: LauncherError | None = None
    for pause_s in _LOOK_AGAIN_S if isinstance(problem, SlurmSilent) else _LOOK_AGAIN_S[:1]:
        time.sleep(pause_s)
        try:
            job = find_by_token(token)
        except LauncherError as error:
            last = error
            continue
        if job is not None:
            return job
        last = None
    if last is not None:
        raise SlurmSilent(f"{problem}, and then: {last}") from last
    return None


# Cancelling.
#
# Tasks of an array that wait are one record in Slurm: `scancel --state=PENDING 12_4` was seen to cancel all
# that wait, 12_5 too (22.05). And without --state it kills a task that has begun meanwhile. So the state is
# asked for where all waiting tasks are meant; of fewer, those are held first, so that they cannot begin.


# Some of them have ended or were cancelled meanwhile: Slurm goes on with the others.
_OVER = re.compile(
    r"Invalid job id|already completing or completed|No active jobs|no longer pending|already finished",
    re.IGNORECASE,
)
# Ids per command, so that its words stay far from what Linux takes.
_AT_ONCE = 2000
_WAITING = "--state=PENDING"


def cancel(labels: Iterable[str], *, only_waiting: bool = True) -> None:
    """Cancel jobs (123) and tasks of arrays (123_4), whoever of them is still there.

    With `only_waiting` what has begun is left alone, even if that was a moment ago. Raises LauncherError when
    Slurm refuses or does not answer.
    """
    wanted = list(dict.fromkeys(labels))
    for some in _batches(wanted):
        if not only_waiting:
            _output("scancel", *joined(some))
            continue
        tasks = [label for label in some if job_and_tasks(label)[1] is not None]
        whole, part = _arrays(tasks)
        if others := [label for label in some if label not in set(tasks)]:
            _output("scancel", _WAITING, *others)
        if whole:
            _output("scancel", _WAITING, *whole)
        if part:
            _cancel_some(part)


def _arrays(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arrays of which all waiting tasks are meant, and the waiting tasks of the others."""
    if not tasks:
        return [], []
    arrays = dict.fromkeys(_array(task) for task in tasks)
    meant, waiting = set(tasks), _waiting(arrays)
    whole = [array for array in arrays if all(task in meant for task in waiting if _array(task) == array)]
    return whole, [task for task in waiting if task in meant and _array(task) not in whole]


def _cancel_some(tasks: Sequence[str]) -> None:
    _output("scontrol", "hold", *joined(tasks))
    waiting = set(_waiting({_array(task) for task in tasks}))
    if held := [task for task in tasks if task in waiting]:
        _output("scancel", *joined(held))
    if begun := [task for task in tasks if task not in waiting]:
        # Held while it ran, it would not start again after a requeue.
        _output("scontrol", "release", *joined(begun))


def _waiting(arrays: Iterable[str]) -> list[str]:
    words = ("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i")
    return _output(*words, f"--jobs={','.join(arrays)}").split()


def _array(task: str) -> str:
    return job_and_tasks(task)[0]


def _output(*words: str) -> str:
    """Run a command and return what it printed, nothing where it only says that jobs are over."""
    try:
        return output_of(words)
    except SlurmRefused as refusal:
        if not _OVER.search(str(refusal)):
            raise
        return ""


def _batches(labels: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(labels)
    while some := list(itertools.islice(iterator, _AT_ONCE)):
        yield some
