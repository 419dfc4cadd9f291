"""Makes the run directory: a name, the frozen configuration, the code's revision and the run's record.

The directory appears as a whole or not at all. The configuration was checked before
(`orchestra.config.rules.all_rules`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import itertools
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orchestra
from conf.schema import Config
from launchers import processes
from orchestra.errors import ConfigError
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir
from orchestra.run.stop_requests import user_name
from orchestra.submit.launch import source_root

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CodeRevision:
    """A commit, and whether tracked files differ from it."""

    commit: str
    dirty: bool


def code_revision(root: Path) -> CodeRevision | None:
    """Return the revision of the tree at `root`; None where it is not a git checkout of this code.

    A virtual environment inside somebody's repository is not a checkout of that repository: the package must
    be tracked.
    """
    if _git(root, "ls-files", "--error-unmatch", "orchestra/__init__.py") is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return CodeRevision(commit.strip(), bool(changes.strip()))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# What Weights & Biases accepts as an id, and short enough to be typed.
_WANDB_ID_BYTES = 4
# How rename(2) says that something stands where the run directory is to go.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True)
class RunRequest:
    """Everything a run is made of: the resolved, checked configuration and where it came from."""

    config: Config
    signature: str
    overrides: Sequence[str] = ()
    command: Sequence[str] = ()


def run_name(request: RunRequest, now: float) -> str:
    """Return the configured name, or one made of the model, the local time and the start of the signature."""
    configured = request.config.run.name
    if configured is not None:
        return configured
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{request.config.model.name}-{stamp}-{request.signature[:6]}"


def planned_run(request: RunRequest, now: float) -> RunDir:
    """Return the directory that the run would get, for a made name the first choice (see `prepare`).

    Raises ConfigError when something is in the place of a configured name.
    """
    run = RunDir(parent_of_runs(request.config) / run_name(request, now))
    if request.config.run.name is not None and os.path.lexists(run.path):
        raise ConfigError(run_taken(run))
    return run


def parent_of_runs(config: Config) -> Path:
    """Return run.dir from the root. Raises ConfigError for somebody's home that does not exist."""
    try:
        return Path(config.run.dir).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"run.dir={config.run.dir}: {error}; write the path out") from error


def run_taken(run: RunDir) -> str:
    """Return why a run cannot have its configured name."""
    return (
        f"run.name={run.name}: {run.path} exists already; choose another run.name, leave it out to have one "
        f"made, or remove that directory"
    )


def frozen_config(request: RunRequest, run: RunDir) -> Config:
    """Return the configuration as the run directory keeps it: with the run's name and place."""
    identity = dataclasses.replace(request.config.run, name=run.name, dir=str(run.path.parent))
    return dataclasses.replace(request.config, run=identity)


def prepare(request: RunRequest, planned: RunDir) -> RunDir:
    """Write the directory of a run that this process trains: config.yaml and run.json; return it.

    Any moment before the end leaves nothing in its place.

    It is `planned`, or with a made name that is taken the first free one of `planned`-2, -3 … Raises
    ConfigError when a configured name was taken meanwhile, or when nothing can be written there.
    """

    def write(draft: Path, place: Path) -> None:
        write_run(request, RunDir(draft), RunDir(place), origin())

    is_named = request.config.run.name is not None
    path = made_as_one(planned.path, write, may_rename=not is_named)
    if path is None:
        raise ConfigError(run_taken(planned))
    return RunDir(path)


def write_run(request: RunRequest, draft: RunDir, run: RunDir, facts: Mapping[str, Any]) -> None:
    """Write the files of `run` into the new folder `draft`; `facts` are those of `origin`, and whatever else
    run.json is to say.
    """
    draft.path.mkdir(parents=True)
    write_config(draft.config, frozen_config(request, run))
    own = {
        "name": run.name,
        "signature": request.signature,
        "overrides": list(request.overrides),
        "command": list(request.command),
        "steps": request.config.train.steps,
        "wandb_id": secrets.token_hex(_WANDB_ID_BYTES),
    }
    draft.record.write_text(json.dumps({**own, **facts}, indent=2) + "\n")


def made_as_one(planned: Path, write: Callable[[Path, Path], None], *, may_rename: bool) -> Path | None:
    """Make a directory with all that is in it or not at all, and return it.

    `write` makes the draft (its first argument) of what is going to be at its second. Where something stands
    in the place the next free one of `planned`-2, -3 … is taken if that is allowed; else None is returned.
    Raises ConfigError when nothing can be written there.
    """
    for path in _choices(planned) if may_rename else [planned]:
        if not os.path.lexists(path) and _is_made(path, write):
            return path
    return None


def _choices(first: Path) -> Iterator[Path]:
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def _is_made(path: Path, write: Callable[[Path, Path], None]) -> bool:
    """Write beside the place and move it there; return False when the place was taken meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    made = [parent for parent in draft.parents if not os.path.lexists(parent)]
    try:
        write(draft, path)
        return _claim(draft, path)
    except OSError as error:
        _discard(draft, made)
        raise ConfigError(
            f"run.dir={path.parent}: cannot make a run directory there: {error.strerror}; "
            f"choose another run.dir"
        ) from error
    except BaseException:
        _discard(draft, made)
        raise


def _claim(draft: Path, path: Path) -> bool:
    """Move the draft in place; a rename refuses a directory with files in it: no run is ever overwritten."""
    try:
        draft.rename(path)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        _discard(draft, [])
        return False
    return True


def _discard(draft: Path, made: list[Path]) -> None:
    """Remove the draft, and the folders `made` for it (innermost first) unless somebody uses them by now."""
    shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in made:
            folder.rmdir()


def origin() -> dict[str, Any]:
    """Return what a run's record says of the process that prepares it and of the code, which is asked once
    for all members of a sweep.
    """
    revision = code_revision(source_root())
    process = processes.find(os.getpid())
    return {
        "created": time.time(),
        "host": socket.gethostname(),
        # Whoever prepares a run starts it, unless it is submitted: a run without an attempt and without this
        # process died.
        "pid": os.getpid(),
        "pid_started": None if process is None else process.started,
        "user": user_name(),
        "code_revision": None if revision is None else dataclasses.asdict(revision),
        "versions": {
            "orchestra": orchestra.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        "python": sys.executable,
    }
