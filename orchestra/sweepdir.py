"""Every path inside a sweep's directory, and its record. Standard library only; it starts and asks nothing.

runs/<sweep>/
├── sweep.json            name, signature, overrides, members, arrays; written as one act
├── code/                 snapshot of the packages, for all members
├── code.array-002/       what later arrays are trained with, where the packages had changed by then
├── array-000.sbatch      the batch scripts, word for word
├── logs/jobs/            what Slurm's jobs wrote themselves: <array>_<task>_<node>_log.out
├── control/              who submits: one claim per array
└── 000/ 001/ …           the members' run directories
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.errors import ConfigError
from orchestra.rundir import RunDir

_VERSION = 1


@dataclass(frozen=True)
class SweepDir:
    """A sweep's directory by its path; the directory need not exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        return self.path / "sweep.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    def code_of_array(self, array: int) -> Path:
        return self.path / f"code.array-{array:03d}"

    def newest_code(self) -> Path:
        """Return the snapshot that was taken last."""
        return max(self.path.glob("code.array-*"), default=self.code)

    @property
    def job_logs(self) -> Path:
        return self.path / "logs" / "jobs"

    @property
    def control(self) -> Path:
        return self.path / "control"

    def script(self, array: int) -> Path:
        return self.path / f"array-{array:03d}.sbatch"

    def claim(self, array: int) -> Path:
        """Who submits the sweep's array of this number: taken once, so that no two commands submit it."""
        return self.control / f"array-{array:03d}.claim"

    def member(self, index: int) -> RunDir:
        """Return the run directory of the member with this index, for members that the sweep made itself."""
        return RunDir(self.path / f"{index:03d}")


@dataclass(frozen=True)
class SweepMember:
    """One combination of a sweep's values, and the run that trains it."""

    index: int
    # Of the resolved configuration: equal for equal results (orchestra.config.signature).
    signature: str
    # What distinguishes it from the others, such as ("optim.lr=1e-4", "parallelism.tp=2").
    overrides: tuple[str, ...]
    # The run's directory when another sweep made it and this one adopted it; None: `SweepDir.member`.
    adopted: str | None = None


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

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the members that its tasks train."""
        return tuple(self.first + task for task in self.tasks)


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
        return sweep.member(member.index) if member.adopted is None else RunDir(Path(member.adopted))


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
    arrays = tuple(SweepArray(**{**array, "tasks": tuple(array["tasks"])}) for array in record["arrays"])
    return Sweep(**{**record, "overrides": tuple(record["overrides"]), "members": members, "arrays": arrays})
