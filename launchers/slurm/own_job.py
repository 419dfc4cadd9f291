"""What a job asks of Slurm about itself, and what it asks Slurm to do with it. It decides nothing.

In an array always by the array's id and the task: the number of its last task is the array's own id, and
`scontrol requeue` of that would start all of its tasks again.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from launchers.errors import SlurmRefused
from launchers.slurm.commands import output_of

# Slurm kills 30 s after it has asked a job to end (KillWait): who asks then must not wait for long.
QUERY_TIMEOUT_S = 5.0
_REQUEUE_TIMEOUT_S = 10.0
# Values may hold spaces, names do not.
_FIELD = re.compile(r"(?:^|\s)(\w+)=(.*?)(?=\s+[\w/:&]+=|\s*$)")
_ENDING = "COMPLETING"
_NOTHING = ("None", "(null)", "N/A", "Unknown")


@dataclass(frozen=True)
class OwnJob:
    """A job as `scontrol show job` tells of it."""

    state: str
    # Such as TimeLimit where that ends it.
    reason: str = ""
    # How often it was started again, a start that is to come included.
    restarts: int = 0
    # Whether a job of more weight takes its nodes, which it still has for the grace time.
    is_preempted: bool = False
    comment: str = ""
    # The script that was submitted.
    script: str | None = None
    # The nodes that it has now, as Slurm writes them; empty: unknown or none.
    nodes: str = ""

    @property
    def is_ending(self) -> bool:
        """Whether Slurm has begun to end it, or it is over."""
        return self.state not in ("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED")


def own_job(job: str, timeout_s: float = QUERY_TIMEOUT_S) -> OwnJob:
    """Return what Slurm says of a job by its id (12, or 12_3). Raises LauncherError; SlurmRefused: gone."""
    words = ("scontrol", "--oneliner", "show", "job", job)
    found = parsed(output_of(words, timeout_s=timeout_s))
    if found is None:
        raise SlurmRefused(f"scontrol show job {job} told nothing that could be read")
    return found


def parsed(text: str) -> OwnJob | None:
    """Return the job in what scontrol printed; None where it printed something else."""
    lines = [line for line in text.splitlines() if "JobState=" in line]
    if not lines:
        return None
    fields = {name: value for name, value in _FIELD.findall(lines[0]) if value not in _NOTHING}
    restarts = fields.get("Restarts", "0")
    return OwnJob(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_preempted="PreemptTime" in fields,
        comment=fields.get("Comment", ""),
        script=fields.get("Command"),
        nodes=fields.get("NodeList", ""),
    )


def requeue(job: str) -> None:
    """Have Slurm end a job and queue it again; this very step may be killed before it returns.

    *Main thread only*: scontrol is started deaf to SIGTERM, which Slurm then sends to all processes of the
    step. Raises SlurmRefused where the job may not be requeued, SlurmSilent where that stays unknown.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        output_of(("scontrol", "requeue", job), timeout_s=_REQUEUE_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
