"""Runs one of Slurm's commands with a time-out, and tells a refusal from silence."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from launchers.errors import SlurmMissing, SlurmRefused, SlurmSilent
from launchers.slurm.environment import scrubbed

QUERY_TIMEOUT_S = 20.0
# Lists of an array's tasks are cut at 64 characters otherwise: 12_[0,2,4,6...].
_WHOLE = {"SLURM_BITSTR_LEN": "0"}
# What Slurm's commands write when no controller or database answered them.
_SILENCE = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (refused|timed out|reset)"
    r"|zero bytes were|communication (connection failure|shutdown)|no route to host|unable to connect"
    r"|establish a configuration source|message (receive|send|sent) (failure|failed)|unexpected message"
    r"|transport endpoint|insane message|broken pipe|unspecified error",
    re.IGNORECASE,
)


def output_of(words: Sequence[str], *, stdin: str = "", timeout_s: float = QUERY_TIMEOUT_S) -> str:
    """Run a command of Slurm's and return what it printed.

    Raises SlurmMissing when this machine does not have it, SlurmRefused with its words when it said no, and
    SlurmSilent when nobody answered: then what was asked for may or may not have happened.
    """
    return both_outputs_of(words, stdin=stdin, timeout_s=timeout_s)[0]


def both_outputs_of(
    words: Sequence[str], *, stdin: str = "", timeout_s: float = QUERY_TIMEOUT_S
) -> tuple[str, str]:
    """Do what `output_of` does and return standard output and standard error."""
    name = words[0]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            env={**scrubbed(os.environ), **_WHOLE},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmMissing(
            f"{name} is not on this machine; type this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{name} got no answer from Slurm's controller within {timeout_s:g} s") from error
    if done.returncode < 0:
        # Slurm ends the commands of a job's step with the job, perhaps after they were heard.
        raise SlurmSilent(f"{name} was ended by signal {-done.returncode}")
    if done.returncode != 0:
        said = _last_words(done.stderr, name) or f"exit code {done.returncode}"
        # Slurm says why it refuses; who ends without a word may have been heard.
        is_silent = not done.stderr.strip() or _SILENCE.search(done.stderr)
        kind = SlurmSilent if is_silent else SlurmRefused
        raise kind(f"{name}: {said}")
    return done.stdout, done.stderr


def _last_words(stderr: str, name: str) -> str:
    lines = [
        re.sub(rf"^{re.escape(name)}:\s*(error|fatal):\s*", "", line.strip()) for line in stderr.splitlines()
    ]
    return "; ".join(line for line in lines if line)
