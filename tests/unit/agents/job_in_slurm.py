"""One job of a run in a stand-in for Slurm, and what tests of the agents read of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.fake_slurm import FakeSlurm

from conf.schema import Config
from launchers.slurm.this_job import JobTask
from orchestra.agents.slurm_job import SlurmJob
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

TASK = JobTask("12", 0, 0, 2, "node1", None, "alps")
NODES = "node[1-2]"
SILENT = "Unable to contact slurm controller (connect failure)"
FAILED = "JobState=FAILED Reason=BadConstraints"

# {0} is the folder of what they say, and of what they were called with.
COMMANDS = {
    "sinfo": 'cat "{0}/nodes"',
    "squeue": 'cat "{0}/queue" && exit 0; echo "{1}" >&2; exit 1',
    "scancel": 'test -e "{0}/deaf" && rm "{0}/deaf" && echo "{1}" >&2 && exit 1; exit 0',
    "scontrol": 'case "$*" in *config*) cat "{0}/config"; exit 0;; requeue*) . "{0}/requeue";; esac\n'
    "for job; do :; done\n"
    'test -e "{0}/silent" && rm "{0}/silent" && echo "{1}" >&2 && exit 1\n'
    'cat "{0}/job-$job" && exit 0; cat "{0}/otherwise" >&2; exit 1',
    # With a list of nodes that it does not like the job is accepted and fails at once.
    "sbatch": 'state="JobState=PENDING Reason=None"; job=20\n'
    'case "$*" in *--exclude*) test -e "{0}/picky" && state="' + FAILED + '" && job=19;; esac\n'
    'test -e "{0}/hopeless" && state="' + FAILED + '"\n'
    'echo "JobId=$job $state Restarts=0" > "{0}/job-$job"; echo $job',
}


class Slurm(FakeSlurm):
    """A cluster of four nodes with one job that runs on two of them: 12."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name, text in COMMANDS.items():
            self.put(name, text.format(folder, SILENT))
        self.has_nodes(**dict.fromkeys(("node1", "node2", "node3", "node4"), "allocated"))
        self.tell("config", "ClusterName = alps\nSlurmdTimeout           = 300 sec\n")
        self.tell("queue")
        # A shell script of its own; what is not known to it is no job.
        self.tell("requeue", "exit 0")
        self.tell("otherwise", "slurm_load_jobs error: Invalid job id specified")
        self.has_job("12")
        # What the stand-in prints for its last word.
        self.tell(f"job-{NODES}", "node1\nnode2\n")

    def tell(self, name: str, text: str = "") -> None:
        """Let the commands that read a file of this name read this text."""
        (self.folder / name).write_text(text)

    def has_nodes(self, **states: str) -> None:
        self.tell("nodes", "".join(f"{name}|main*|{state}\n" for name, state in states.items()))

    def has_job(self, job: str, state: str = "RUNNING", restarts: int = 0, **facts: str) -> None:
        others = {"Reason": "None", "Command": "/job.sbatch", **facts}
        words = [f"JobId={job} JobState={state} Restarts={restarts}"]
        self.tell(f"job-{job}", " ".join(words + [f"{key}={value}" for key, value in others.items()]) + "\n")


def job_of(run: RunDir, nodes: int, spares: int = 0, **own: Any) -> SlurmJob:
    config = Config()
    cluster = replace(config.cluster, nodes=nodes, spare_nodes=spares, **own)
    return SlurmJob(run, replace(config, cluster=cluster), TASK)


def record(run: RunDir, *entries: Record) -> None:
    """Write the jobs that the run was submitted as; without any the one that runs."""
    jobs = entries or ({"token": "orchestra:0", "id": "12", "attempt": 0},)
    run.record.write_text(json.dumps({"name": "mine", "jobs": jobs}))


def jobs(run: RunDir) -> list[Record]:
    return list(json.loads(run.record.read_text())["jobs"])


def requeued(run: RunDir) -> list[Record]:
    return [event for event in read_events(run) if event["event"] == "requeued"]


def options(call: str, name: str) -> str | None:
    return next((word.partition("=")[2] for word in call.split() if word.startswith(f"--{name}=")), None)
