"""Runs one of Slurm's commands with a time-out, and distinguishes a refusal from no answer.

Also what every caller needs to know of the cluster itself: its settings, its name, the limits of job arrays.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from launchers import LauncherError, SlurmMissing, SlurmRefused, SlurmSilent

# sbatch takes options from variables and hands the whole environment on to the job. Typed inside another
# allocation it would take over that one's nodes, tasks and limits.
_OF_AN_ALLOCATION = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|PMIX|PMI|PMI2)_")
# Which cluster is meant, not what was allocated on it.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"})
# What commands print and which jobs they show or end: a filter would make a job look gone.
_OF_A_COMMAND = re.compile(r"(SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SPRIO|SSTAT|SACCTMGR)_")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the caller's own allocation and without options in variables."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (_OF_AN_ALLOCATION.match(name) or _OF_A_COMMAND.match(name))
    }


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

_UNCONFIGURED = "establish a configuration source"
# What a command says on a machine that has Slurm's programs and belongs to no cluster.
NO_CLUSTER = "no configuration of a Slurm cluster (SLURM_CONF, or a name server that knows one)"


def output_of(words: Sequence[str], *, timeout_s: float = QUERY_TIMEOUT_S) -> str:
    """Run a command of Slurm's and return what it printed.

    Raises SlurmMissing when this machine does not have it, SlurmRefused with its words when it said no, and
    SlurmSilent when nobody answered: then what was asked for may or may not have happened.
    """
    return both_outputs_of(words, timeout_s=timeout_s)[0]


def both_outputs_of(
    words: Sequence[str], *, stdin: str = "", timeout_s: float = QUERY_TIMEOUT_S
) -> tuple[str, str]:
    """Do what `output_of` does and return standard output and standard error."""
    name = words[0]
    try:
        code, stdout, stderr = _run(words, stdin, timeout_s)
    except FileNotFoundError as error:
        raise SlurmMissing(
            f"{name} is not on this machine; type this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{name} got no answer from Slurm's controller within {timeout_s:g} s") from error
    if code < 0:
        # Slurm ends the commands of a job's step with the job, perhaps after the controller had its request.
        raise SlurmSilent(f"{name} was ended by signal {-code}")
    if code != 0:
        reason = _last_words(stderr, name) or f"exit code {code}"
        if _UNCONFIGURED in reason:
            # Slurm says it in four sentences of name servers.
            raise SlurmSilent(f"{name} finds {NO_CLUSTER}")
        # Slurm says why it refuses; a command that ends without a word may have reached the controller.
        is_silent = not stderr.strip() or _SILENCE.search(stderr)
        kind = SlurmSilent if is_silent else SlurmRefused
        raise kind(f"{name}: {reason}")
    return stdout, stderr


def _run(words: Sequence[str], stdin: str, timeout_s: float) -> tuple[int, str, str]:
    """Return the exit code of a command and what it printed on both outputs. Raises subprocess.TimeoutExpired
    and OSError.

    In a session of its own, so that what a site's wrapper has started ends with it.
    """
    pipe, environment = subprocess.PIPE, {**scrubbed(os.environ), **_WHOLE}
    with subprocess.Popen(
        words,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as command:
        try:
            stdout, stderr = command.communicate(stdin, timeout=timeout_s)
        except BaseException:
            # Ctrl-C does not reach it there.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            raise
    return command.returncode, stdout, stderr


def _last_words(stderr: str, name: str) -> str:
    lines = [
        re.sub(rf"^{re.escape(name)}:\s*(error|fatal):\s*", "", line.strip()) for line in stderr.splitlines()
    ]
    return "; ".join(line for line in lines if line)


# For the name, where the queue has answered already or the records speak without it.
_NAME_TIMEOUT_S = 8.0
# A name that nobody said is asked for again after so long.
_ASK_AGAIN_S = 60.0


def settings(timeout_s: float = 20.0) -> dict[str, str]:
    """Return the controller's settings by name. Raises SlurmMissing, SlurmRefused and SlurmSilent."""
    return parsed_settings(output_of(("scontrol", "show", "config"), timeout_s=timeout_s))


def parsed_settings(text: str) -> dict[str, str]:
    """Return the settings in what scontrol printed; lines that say something else are passed over."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {
        name.strip(): value.strip() for name, equals, value in pairs if equals and " " not in name.strip()
    }


def cluster_name(environment: Mapping[str, str]) -> str:
    """Return the cluster's name; inside a job Slurm has said it.

    Raises SlurmRefused where it has to be asked and nobody says it.
    """
    name = environment.get("SLURM_CLUSTER_NAME") or asked_cluster()
    if not name:
        raise SlurmRefused("scontrol show config names no cluster")
    return name


# The name and when it was asked for, by the variables that decide which cluster is asked.
_names: dict[tuple[str | None, ...], tuple[str | None, float]] = {}


def asked_cluster() -> str | None:
    """Return the name of the cluster that Slurm's commands ask from here; None where it is not to be had.

    It is asked for once; where nobody answered, again after a minute. What a job around this process says is
    passed over: the commands may be meant for another cluster.
    """
    where = tuple(os.environ.get(name) for name in ("SLURM_CONF", "SLURM_CLUSTERS", "PATH"))
    name, asked_at = _names.get(where, (None, -_ASK_AGAIN_S))
    if name is None and time.monotonic() - asked_at >= _ASK_AGAIN_S:
        try:
            name = settings(_NAME_TIMEOUT_S).get("ClusterName")
        except LauncherError:
            name = None
        _names[where] = (name, time.monotonic())
    return name


# What sbatch says when a user, an account, a QOS or the controller has as many jobs as it may have. The job
# itself is right: it is accepted once others have ended.
_FULL = re.compile(
    r"submit ?limit|submit ?job ?limit|max ?submit|violates accounting/qos policy"
    r"|job queue full|temporarily unable to accept|resource temporarily unavailable|maxjobcount",
    re.IGNORECASE,
)


# Slurm's own, for a controller that does not say.
DEFAULT_ARRAY_SIZE = 1001


def array_size() -> int:
    """Return what one job array may hold: its tasks are numbered from 0 to one less. 0: no arrays at all.

    Raises SlurmMissing, SlurmRefused and SlurmSilent.
    """
    size = settings().get("MaxArraySize", "")
    return int(size) if size.isdecimal() else DEFAULT_ARRAY_SIZE


def is_full(refusal: str) -> bool:
    """Whether Slurm refused a job only because there are too many already."""
    return _FULL.search(refusal) is not None
