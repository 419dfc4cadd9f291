"""Hands a batch script to Slurm, once: a job whose answer was lost is found again by its token.

It writes no files. Slurm copies the script when it accepts it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import SlurmRefused, SlurmSilent
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
    `--comment=TOKEN` and `--array=3,7`. When sbatch is not answered the queue is searched for the token, so
    that a job that was accepted is not submitted twice. Raises SlurmRefused when Slurm said no, and
    SlurmSilent when it stays unknown whether there is a job.
    """
    try:
        words = ("sbatch", "--parsable", *options, str(script))
        # The id, and after a semicolon the cluster's name.
        return output_of(words, timeout_s=_SUBMIT_TIMEOUT_S).strip().splitlines()[-1].partition(";")[0]
    except SlurmSilent as silence:
        found = _found_later(token, silence)
        if found is None:
            raise SlurmRefused(f"{silence}; the queue holds no such job") from silence
        return found
    except IndexError as error:
        raise SlurmSilent("sbatch printed no job id") from error


def _found_later(token: str, silence: SlurmSilent) -> str | None:
    """Look for the job several times; None when Slurm answered to the last and did not have it."""
    last = silence
    for pause_s in _LOOK_AGAIN_S:
        time.sleep(pause_s)
        try:
            found = find_by_token(token)
        except SlurmSilent as error:
            last = error
            continue
        if found is not None:
            return found
    if last is not silence:
        raise SlurmSilent(f"{silence}, and then: {last}") from last
    return None
