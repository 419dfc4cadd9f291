"""Every path inside a run directory, named once. Standard library only; it reads and writes nothing itself.

runs/<name>/
├── config.yaml              resolved and frozen; the only configuration that workers read
├── config.attempt-000.yaml  what config.yaml was up to that attempt, where a resume changed it
├── run.json                 name, signature, overrides, code revision, jobs, wandb id, resumes
├── metrics.jsonl            rank 0, one line per logged step
├── events/<writer>.jsonl    append-only, one writer per file
├── times/<writer>.jsonl     each rank's own times in the steps that were timed
├── logs/attempt-000/        node-000.log (agent and torchrun), rank-00000.log (each worker),
│                            rank-00000.stacks (of ranks that hung), rank-00000.collectives.json (of
│                            collectives that stalled), nccl-0 (a dump of NCCL's own watchdog)
├── logs/jobs/               what Slurm's jobs wrote themselves: <job>_<node>_log.out
├── code/                    snapshot of the packages, for a run that was submitted
├── plugins/                 copies of the plug-ins' packages, as they were when it was submitted
├── code.attempt-000/        what code/ was up to that attempt, where a resume brought another
├── job.sbatch               the batch script, word for word
├── config.alternative-1.yaml, job.alternative-1.sbatch   of other kinds of nodes (cluster.alternatives)
├── checkpoints/             step-00000100/ with manifest.json, unless checkpoint.dir says another place
├── control/                 attempt-001.claim: who leads that attempt; attempt-001.stop-….json: who asks it
│                            to stop; attempt-001.profile-….json: to trace some steps; array-000.place-0.json:
│                            which job trains a member that shares its node; alternative.json: which of
│                            several kinds of nodes started first
├── heartbeats/node-000.json how far that node's ranks have come, every ten seconds anew
├── rehearsal.json           of a rehearsal's run with faults: what it is compared with
├── samples/  profile/  wandb/  tensorboard/
└── report.html
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import Offload, ParallelismConfig
from orchestra.errors import ConfigError


class _Below:
    """The path of a file or folder below a run's or a sweep's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDir | SweepDir, _: type) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A run directory by its path; the directory need not exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    config = _Below("config.yaml")
    record = _Below("run.json")
    rehearsal = _Below("rehearsal.json")
    metrics = _Below("metrics.jsonl")
    events = _Below("events")
    times = _Below("times")
    report = _Below("report.html")
    samples = _Below("samples")
    heartbeats = _Below("heartbeats")
    checkpoints = _Below("checkpoints")
    control = _Below("control")
    profile = _Below("profile")
    wandb = _Below("wandb")
    tensorboard = _Below("tensorboard")
    logs = _Below("logs")
    job_logs = _Below("logs/jobs")
    code = _Below("code")
    plugins = _Below("plugins")
    batch_script = _Below("job.sbatch")
    alternative = _Below("control/alternative.json")

    def has_records(self) -> bool:
        """Whether what a run begins with is there: it is gone where the run was removed or renamed, though
        whoever writes makes folders anew. Raises OSError where that cannot be seen.
        """
        return self.record.exists() or self.config.exists()

    def config_of_attempt(self, attempt: int) -> Path:
        return self.path / f"config.attempt-{attempt:03d}.yaml"

    def config_of_alternative(self, number: int) -> Path:
        return self.path / f"config.alternative-{number}.yaml"

    def script_of_alternative(self, number: int) -> Path:
        return self.path / f"job.alternative-{number}.sbatch" if number else self.batch_script

    def claim(self, attempt: int) -> Path:
        return self.control / f"attempt-{attempt:03d}.claim"

    def code_of_attempt(self, attempt: int) -> Path:
        return self.path / f"code.attempt-{attempt:03d}"

    def turn(self, number: int, time: int) -> Path:
        """Who submits the run's job of this number, as often as somebody died over it."""
        return self.control / f"job-{number:03d}.turn-{time}.claim"

    def place(self, array: int, number: int) -> Path:
        """Who trains a member that shares its node, as often as somebody took it out of the array's list."""
        return self.control / f"array-{array:03d}.place-{number}.json"

    def place_end(self, array: int, number: int) -> Path:
        """How that ended."""
        return self.control / f"array-{array:03d}.place-{number}.end"

    def stop_request(self, attempt: int, token: str) -> Path:
        return self.control / f"attempt-{attempt:03d}.stop-{token}.json"

    def profile_request(self, attempt: int, token: str) -> Path:
        return self.control / f"attempt-{attempt:03d}.profile-{token}.json"

    def meeting(self, job: str, restart: int) -> Path:
        """Where the nodes of one start of a job learn which attempt it is and where they meet."""
        return self.control / f"job-{job}.start-{restart}.json"

    def event_file(self, writer: str) -> Path:
        return self.events / f"{writer}.jsonl"

    def times_file(self, writer: str) -> Path:
        return self.times / f"{writer}.jsonl"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:03d}"

    def node_log(self, attempt: int, node: int) -> Path:
        return self.attempt_logs(attempt) / f"node-{node:03d}.log"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.log"

    def rank_stacks(self, attempt: int, rank: int) -> Path:
        """What the threads of a rank were doing when it, or one that it waited for, was found to hang."""
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.stacks"

    def rank_collectives(self, attempt: int, rank: int) -> Path:
        """What a rank's collectives had done last when one of them stalled."""
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.collectives.json"

    def nccl_dumps(self, attempt: int) -> Path:
        """How the dumps of NCCL's watchdog begin; torch adds the rank."""
        return self.attempt_logs(attempt) / "nccl-"

    def heartbeat(self, node: int) -> Path:
        """How far a node's ranks have come, every ten seconds anew."""
        return self.heartbeats / f"node-{node:03d}.json"


# Every path inside a sweep's directory, and its record. Standard library only.
#
# runs/<sweep>/
# ├── sweep.json            name, signature, overrides, members, arrays; written as one act
# ├── code/                 snapshot of the packages, for all members
# ├── plugins/              copies of the plug-ins' packages, for all members
# ├── code.array-002/       what later arrays are trained with, where the packages had changed by then
# ├── array-000.sbatch      the batch scripts, word for word
# ├── logs/jobs/            what Slurm's jobs wrote themselves: <array>_<task>_<node>_log.out
# ├── control/              who submits: one claim per array
# ├── report.html
# └── 000/ 001/ …           the members' run directories


_VERSION = 1


@dataclass(frozen=True)
class SweepDir:
    """A sweep's directory by its path; the directory need not exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    record = _Below("sweep.json")
    code = _Below("code")
    plugins = _Below("plugins")
    job_logs = _Below("logs/jobs")
    control = _Below("control")
    report = _Below("report.html")

    def has_records(self) -> bool:
        """Whether the sweep's record is there. Raises OSError where that cannot be seen."""
        return self.record.exists()

    def code_of_array(self, array: int) -> Path:
        return self.path / f"code.array-{array:03d}"

    def newest_code(self) -> Path:
        """Return the snapshot that was taken last."""
        return max(self.path.glob("code.array-*"), default=self.code)

    def script(self, array: int) -> Path:
        return self.path / f"array-{array:03d}.sbatch"

    def claim(self, array: int) -> Path:
        """Who submits the sweep's array of this number: taken once, so that no two commands submit it."""
        return self.control / f"array-{array:03d}.claim"

    def left(self, array: int, job: str, start: int) -> Path:
        """That a start of a job of this array takes no more of the members that share its node."""
        return self.control / f"array-{array:03d}.job-{job}.start-{start}.left"

    def member(self, index: int) -> RunDir:
        """Return the run directory of the member with this index, for members that the sweep made itself."""
        return RunDir(self.path / f"{index:03d}")


@dataclass(frozen=True)
class SweepMember:
    """One combination of a sweep's values, and the run that trains it."""

    index: int
    # Of the resolved configuration: equal for equal results (orchestra.config.machine).
    signature: str
    # What distinguishes it from the others, such as ("optim.lr=1e-4", "parallelism.tp=2").
    overrides: tuple[str, ...]
    # The run's directory when another sweep made it and this one adopted it; None: `SweepDir.member`.
    adopted: str | None = None

    def run(self, sweep: SweepDir) -> RunDir:
        """Return its run, wherever it lies."""
        return sweep.member(self.index) if self.adopted is None else RunDir(Path(self.adopted))


@dataclass(frozen=True)
class SweepArray:
    """One Slurm array of a sweep: its task t trains the member with index `first` + t."""

    number: int
    # In the job's comment; by it the array is found again when sbatch's answer was lost.
    token: str
    first: int
    tasks: tuple[int, ...]
    name: str
    user: str
    # Unix seconds of the intent.
    submitted: float
    # The array's job id; None while sbatch's answer is not known.
    id: str | None = None
    # Indices of the members that share its tasks' nodes (cluster.members_per_node), whichever of them takes
    # which; empty where each task trains one member.
    packed: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the members that its tasks train."""
        return self.packed or tuple(self.first + task for task in self.tasks)


@dataclass(frozen=True)
class Sweep:
    """A sweep's record, as sweep.json holds it."""

    name: str
    # Of its members' signatures, in whatever order they were typed.
    signature: str
    # As typed, swept ones among them.
    overrides: tuple[str, ...]
    members: tuple[SweepMember, ...]
    arrays: tuple[SweepArray, ...] = ()
    # Unix seconds.
    created: float = 0.0
    # Whatever else the record says, such as command, host, user, code_revision, versions.
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, sweep: SweepDir, member: SweepMember) -> RunDir:
        """Return a member's run, wherever it lies."""
        return member.run(sweep)


def is_sweep(path: Path) -> bool:
    """Tell whether a directory is a sweep's; one that may not be read counts as none."""
    try:
        return SweepDir(path).record.is_file()
    except OSError:
        return False


def to_json(sweep: Sweep) -> str:
    """Return the text of sweep.json."""
    return json.dumps({"version": _VERSION, **dataclasses.asdict(sweep)}, indent=1) + "\n"


def read_sweep(sweep: SweepDir) -> Sweep:
    """Read a sweep's record. Raises ConfigError naming the file when it is missing or torn."""
    try:
        return _parsed(json.loads(sweep.record.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{sweep.record}: not the record of a sweep of this version: {error}") from error


def _parsed(record: dict[str, Any]) -> Sweep:
    if record.pop("version", None) != _VERSION:
        raise ValueError(f"expected version {_VERSION}")
    members = tuple(
        SweepMember(**{**member, "overrides": tuple(member["overrides"])}) for member in record["members"]
    )
    arrays = tuple(
        SweepArray(**{**array, "tasks": tuple(array["tasks"]), "packed": tuple(array.get("packed", ()))})
        for array in record["arrays"]
    )
    return Sweep(**{**record, "overrides": tuple(record["overrides"]), "members": members, "arrays": arrays})


def offload_folder(parallelism: ParallelismConfig) -> str | None:
    """Return the folder on this node where state lies on disk, variables of this node in its name; None where
    none does.
    """
    if parallelism.offload is not Offload.optimizer_disk or parallelism.offload_dir is None:
        return None
    return os.path.expandvars(parallelism.offload_dir)
