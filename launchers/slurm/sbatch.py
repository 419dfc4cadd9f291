"""Hands a batch script to Slurm, once: a job whose answer was lost is found again by its token.

It writes no files. Slurm copies the script when it accepts it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import LauncherError, SlurmRefused, SlurmSilent
from launchers.slurm.commands import both_outputs_of, output_of
from launchers.slurm.states import find_by_token

_SUBMIT_TIMEOUT_S = 60.0
# A controller that was too busy to answer may still accept what it was sent.
_LOOK_AGAIN_S = (0.0, 2.0, 5.0, 10.0)
_ESTIMATE = re.compile(
    r"to start at (?P<time>\S+) using (?P<processors>\d+) processors on nodes (?P<nodes>\S+)"
)


@dataclass(frozen=True)
class Estimate:
    """What Slurm expects of a job that it would accept: local time of its start, and the nodes."""

    start: str
    nodes: str


def tested(script: str) -> Estimate | None:
    """Ask Slurm whether it would accept a script, without submitting it; None where it gives no estimate.

    Raises SlurmRefused with its reason, SlurmSilent and SlurmMissing.
    """
    _, said = both_outputs_of(("sbatch", "--test-only"), stdin=script)
    match = _ESTIMATE.search(said)
    return Estimate(match["time"], match["nodes"]) if match else None


def submit(script: Path, token: str, options: Sequence[str] = ()) -> str:
    """Submit a script whose comment holds `token`, and return the job's id.

    `options` are further words for sbatch, stronger than the script's own: a script is submitted again with
    `--comment=TOKEN` and `--array=3,7`. Whatever else than an id sbatch answers, the queue is searched for
    the token: a site's wrapper or a dying command may complain of a job that Slurm has. Raises SlurmRefused
    when Slurm said no and has no such job, and SlurmSilent when it stays unknown whether there is one.
    """
    words = ("sbatch", "--parsable", *options, str(script))
    try:
        # The id, and after a semicolon the cluster's name.
        answer = output_of(words, timeout_s=_SUBMIT_TIMEOUT_S).strip().splitlines()[-1:]
        if answer and answer[0]:
            return answer[0].partition(";")[0]
        problem: SlurmRefused | SlurmSilent = SlurmSilent("sbatch printed no job id")
    except (SlurmRefused, SlurmSilent) as error:
        problem = error
    found = _found_later(token, problem)
    if found is not None:
        return found
    if isinstance(problem, SlurmRefused):
        raise problem
    raise SlurmRefused(f"{problem}; the queue holds no such job") from problem


def _found_later(token: str, problem: LauncherError) -> str | None:
    """Look for the job, after silence several times; None when Slurm answered last and did not have it.

    Raises SlurmSilent where the queue cannot be looked into: nothing may be concluded from that.
    """
    last: LauncherError | None = None
    for pause_s in _LOOK_AGAIN_S if isinstance(problem, SlurmSilent) else _LOOK_AGAIN_S[:1]:
        time.sleep(pause_s)
        try:
            found = find_by_token(token)
        except LauncherError as error:
            last = error
            continue
        if found is not None:
            return found
        last = None
    if last is not None:
        raise SlurmSilent(f"{problem}, and then: {last}") from last
    return None
