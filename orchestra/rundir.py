"""Every path inside a run directory, named once. Standard library only; it reads and writes nothing itself.

runs/<name>/
├── config.yaml              resolved and frozen; the only configuration that workers read
├── config.attempt-000.yaml  what config.yaml was up to that attempt, where a resume changed it
├── run.json                 name, signature, overrides, code revision, jobs, wandb id, resumes
├── metrics.jsonl            rank 0, one line per logged step
├── events/<writer>.jsonl    append-only, one writer per file
├── logs/attempt-000/        node-000.log (agent and torchrun), rank-00000.log (each worker),
│                            rank-00000.stacks (of ranks that hung)
├── logs/jobs/               what Slurm's jobs wrote themselves: <job>_<node>_log.out
├── code/                    snapshot of the packages, for a run that was submitted
├── code.attempt-000/        what code/ was up to that attempt, where a resume brought another
├── job.sbatch               the batch script, word for word
├── checkpoints/             step-00000100/ with manifest.json, unless checkpoint.dir says another place
├── control/                 attempt-001.claim: who leads that attempt; attempt-001.stop-….json: who asks it
│                            to stop
├── heartbeats/node-000.json how far that node's ranks have come, every ten seconds anew
├── rehearsal.json           of a rehearsal's run that faults befell: what it is compared with
├── samples/  profile/  wandb/
└── report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """A run directory by its path; the directory need not exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def rehearsal(self) -> Path:
        return self.path / "rehearsal.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def job_logs(self) -> Path:
        return self.logs / "jobs"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def batch_script(self) -> Path:
        return self.path / "job.sbatch"

    def config_of_attempt(self, attempt: int) -> Path:
        return self.path / f"config.attempt-{attempt:03d}.yaml"

    def claim(self, attempt: int) -> Path:
        return self.control / f"attempt-{attempt:03d}.claim"

    def code_of_attempt(self, attempt: int) -> Path:
        return self.path / f"code.attempt-{attempt:03d}"

    def turn(self, number: int, time: int) -> Path:
        """Who submits the run's job of this number, as often as somebody died over it."""
        return self.control / f"job-{number:03d}.turn-{time}.claim"

    def stop_request(self, attempt: int, token: str) -> Path:
        return self.control / f"attempt-{attempt:03d}.stop-{token}.json"

    def meeting(self, job: str, restart: int) -> Path:
        """Where the nodes of one start of a job learn which attempt it is and where they meet."""
        return self.control / f"job-{job}.start-{restart}.json"

    def event_file(self, writer: str) -> Path:
        return self.events / f"{writer}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:03d}"

    def node_log(self, attempt: int, node: int) -> Path:
        return self.attempt_logs(attempt) / f"node-{node:03d}.log"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.log"

    def rank_stacks(self, attempt: int, rank: int) -> Path:
        """What the threads of a rank were doing when it, or one that it waited for, was found to hang."""
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.stacks"

    def heartbeat(self, node: int) -> Path:
        """How far a node's ranks have come, every ten seconds anew."""
        return self.heartbeats / f"node-{node:03d}.json"
