"""Makes the run directory: a name, the frozen configuration, the run's record, the code's revision and copy.

The directory appears as a whole or not at all. The configuration was checked before
(`orchestra.config.rules.all_rules`). The copy of the code is for runs that are submitted: nothing that is
edited later reaches them. It holds the four packages as they lie on disk, changes that were never committed
too, and no more of what lies beside them.
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
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orchestra
from conf.schema import Config
from launchers import processes
from orchestra.config.rules.checkpoint_rules import local_folder
from orchestra.errors import ConfigError
from orchestra.plugins import sources_of
from orchestra.run.config_file import write_config
from orchestra.run.control.stop_requests import user_name
from orchestra.run.files import other_place
from orchestra.run.paths import RunDir, SweepDir, is_sweep
from orchestra.run.permissions import give_to_group, make_for_group, open_to_group
from orchestra.run.record import fallback_place
from orchestra.sizes.topology import length_of
from orchestra.sizes.units import MIB
from orchestra.submit.launch import source_root

PACKAGES = ("conf", "orchestra", "launchers", "checkpointing")
# The packages themselves have less than 3 MiB; whoever keeps data among them would copy it for every run.
_MAX_BYTES = 32 * MIB
_NUM_LARGEST = 3
# What a run's name has not (run.name), and how much of it a model's may be.
_NOT_OF_NAMES, _LONGEST_MODEL = re.compile(r"[^A-Za-z0-9._-]+"), 60
_left_out = shutil.ignore_patterns("__pycache__", ".*", "*.pyc", "*~")
_GIT_TIMEOUT_S = 5.0
# What Weights & Biases accepts as an id, and short enough to be typed.
_WANDB_ID_BYTES = 4
# How rename(2) says that something stands where the run directory is to go.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def code_revision() -> dict[str, Any] | None:
    """Return the `commit` of the code that is running, and whether tracked files differ (`dirty`).

    None where it is no git checkout of this code. A virtual environment inside somebody's repository is not a
    checkout of that repository: the package must be tracked.
    """
    if _git("ls-files", "--error-unmatch", "orchestra/__init__.py") is None:
        return None
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(source_root()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def take_snapshot(target: Path) -> None:
    """Copy the packages that are running into the new folder `target`.

    Raises ConfigError when they are too large, naming the largest files.
    """
    root = source_root()
    sizes = {file: (root / file).stat().st_size for file in _files_of_packages(root)}
    total = sum(sizes.values())
    if total > _MAX_BYTES:
        largest = sorted(sizes, key=lambda file: -sizes[file])[:_NUM_LARGEST]
        named = ", ".join(f"{file} ({sizes[file] / MIB:,.0f} MiB)" for file in largest)
        raise ConfigError(
            f"the code to be copied into the run has {total / MIB:,.0f} MiB, at most "
            f"{_MAX_BYTES / MIB:,.0f} MiB are allowed; the largest files are {named}: "
            f"move them out of {', '.join(PACKAGES)}"
        )
    for file in sizes:
        copy = target / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, copy)


def take_plugins(configs: Iterable[Config], target: Path) -> None:
    """Copy the plug-ins' packages that nobody installed into the new folder `target`, if there are any.

    They stay as they are for the run's whole life: a resume goes on with them. Raises ConfigError when they
    are too large.
    """
    sources = [source for config in configs for source in sources_of(config)]
    for place in sorted({source.place for source in sources if source.place is not None}):
        files = [place / file for file in _files_below(place)] if place.is_dir() else [place]
        total = sum(file.stat().st_size for file in files)
        if total > _MAX_BYTES:
            raise ConfigError(
                f"the plug-in in {place} has {total / MIB:,.0f} MiB, at most {_MAX_BYTES / MIB:,.0f} MiB are "
                "copied into a run; move its data elsewhere, or install it"
            )
        for file in files:
            copy = target / file.relative_to(place.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def plugin_facts_of(config: Config) -> dict[str, str]:
    """Return, for run.json, each plug-in's module with its version, or that it was copied."""
    return {source.module: source.version or "copied" for source in sources_of(config)}


def is_snapshot(folder: Path) -> bool:
    """Tell whether a folder holds the packages that are running, byte for byte, and nothing else that could
    be imported.
    """
    root = source_root()
    files = _files_of_packages(root)
    try:
        others = {place.name for place in folder.iterdir()} - {*PACKAGES, "__pycache__"}
        is_equal = not others and _files_of_packages(folder) == files
        return is_equal and all((folder / file).read_bytes() == (root / file).read_bytes() for file in files)
    except OSError:
        return False


def renew_snapshot(code: Path, older: Path | None = None) -> bool:
    """Make `code` a snapshot of the code that is running; return False where it is one already.

    What was there is moved to `older`, or removed. Raises ConfigError as `take_snapshot` does.
    """
    if is_snapshot(code):
        return False
    draft = code.with_name(f".{code.name}.{secrets.token_hex(4)}")
    try:
        take_snapshot(draft)
        if older is not None and code.is_dir():
            shutil.rmtree(older, ignore_errors=True)
            code.rename(older)
        shutil.rmtree(code, ignore_errors=True)
        draft.rename(code)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _files_of_packages(root: Path) -> list[Path]:
    """Return the files that a snapshot holds, by their paths below `root`."""
    return [package / file for package in map(Path, PACKAGES) for file in _files_below(root / package)]


def _files_below(folder: Path) -> list[Path]:
    """Return the files of a package that are copied, by their paths below its folder."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        ignored = _left_out(parent, [*folders, *names])
        folders[:] = sorted(set(folders) - ignored)
        paths = (Path(parent, name) for name in sorted(set(names) - ignored))
        files += [path.relative_to(folder) for path in paths if path.is_file()]
    return files


@dataclass(frozen=True)
class RunRequest:
    """Everything a run is made of: the resolved, checked configuration and where it came from."""

    config: Config
    signature: str
    overrides: Sequence[str] = ()
    command: Sequence[str] = ()


def planned_run(request: RunRequest, now: float) -> RunDir:
    """Return the directory that the run would get: with its configured name, or one made of the model, the
    local time and the start of the signature, for which `prepare` may find another place.

    Raises ConfigError when something is in the place of a configured name.
    """
    name, parent = request.config.run.name, parent_of_runs(request.config)
    if name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        # A model may be called org/name, and longer than a file.
        model = _NOT_OF_NAMES.sub("-", request.config.model.name).lstrip("-._")[:_LONGEST_MODEL] or "run"
        return RunDir(parent / f"{model}-{stamp}-{request.signature[:6]}")
    run = RunDir(parent / name)
    if os.path.lexists(run.path):
        raise ConfigError(name_taken(run))
    return run


def parent_of_runs(config: Config) -> Path:
    """Return run.dir from the root. Raises ConfigError for somebody's home that does not exist."""
    try:
        return Path(config.run.dir).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"run.dir={config.run.dir}: {error}; write the path out") from error


def name_taken(place: RunDir | SweepDir) -> str:
    """Return why a run or a sweep cannot have its configured name."""
    which = "another" if isinstance(place, SweepDir) else "a"
    holds = f" and holds {which} sweep" if is_sweep(place.path) else ""
    return (
        f"run.name={place.name}: {place.path} exists already{holds}; choose another run.name, leave it out "
        "to have one made, or remove that directory"
    )


def frozen_config(request: RunRequest, run: RunDir) -> Config:
    """Return the configuration as the run directory keeps it: with the run's name and place."""
    identity = dataclasses.replace(request.config.run, name=run.name, dir=str(run.path.parent))
    return dataclasses.replace(request.config, run=identity)


def prepare(request: RunRequest, planned: RunDir) -> RunDir:
    """Write the directory of a run that this process trains: config.yaml and run.json; return it.

    It is `planned`, or with a made name that is taken the first free one of `planned`-2, -3 … Raises
    ConfigError when a configured name was taken meanwhile, or when nothing can be written there.
    """

    def write(draft: Path, place: Path) -> None:
        write_run(request, RunDir(draft), RunDir(place), origin())
        give_to_group(draft, request.config.run.group)

    is_named = request.config.run.name is not None
    open_to_group(request.config.run.group)
    path = made_as_one(planned.path, write, may_rename=not is_named)
    if path is None:
        raise ConfigError(name_taken(planned))
    share_checkpoints(RunDir(path), request.config)
    return RunDir(path)


def write_run(request: RunRequest, draft: RunDir, run: RunDir, facts: Mapping[str, Any]) -> None:
    """Write the files of `run` into the new folder `draft`; `facts` are those of `origin`, and whatever else
    run.json is to say.
    """
    draft.path.mkdir(parents=True)
    write_config(draft.config, frozen_config(request, run))
    own: dict[str, Any] = {
        "name": run.name,
        "signature": request.signature,
        "overrides": list(request.overrides),
        "command": list(request.command),
        **length_of(request.config.train),
        "wandb_id": secrets.token_hex(_WANDB_ID_BYTES),
    }
    if plugins := plugin_facts_of(request.config):
        own["plugins"] = plugins
    draft.record.write_text(json.dumps({**own, **facts}, indent=2) + "\n")


def share_checkpoints(run: RunDir, config: Config) -> None:
    """Give the folders that the checkpoints of a run go into, which is in its place, to its group, where it
    has one. What cannot be given stays as it is: who may not write there is told so.
    """
    settings, group = config.checkpoint, config.run.group
    for place in (settings.dir, fallback_place(run, settings.fallback_dir)):
        folder = None if place is None else local_folder(place)
        if folder is not None and group is not None:
            with contextlib.suppress(OSError):
                make_for_group(folder, group)


def made_as_one(planned: Path, write: Callable[[Path, Path], None], *, may_rename: bool) -> Path | None:
    """Make a directory with all that is in it or not at all, and return it.

    `write` makes the draft (its first argument) of what is going to be at its second. Where something stands
    in the place the next free one of `planned`-2, -3 … is taken if that is allowed; else None is returned.
    Raises ConfigError when nothing can be written there.
    """
    others = (planned.with_name(f"{planned.name}-{number}") for number in itertools.count(2))
    for path in itertools.chain([planned], others if may_rename else ()):
        if not os.path.lexists(path) and _is_made(path, write):
            return path
    return None


def _is_made(path: Path, write: Callable[[Path, Path], None]) -> bool:
    """Write beside the place and move it there; return False when the place was taken meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    missing = [parent for parent in draft.parents if not os.path.lexists(parent)]
    is_made = False
    try:
        write(draft, path)
        is_made = _is_moved(draft, path)
    except OSError as error:
        raise ConfigError(
            f"run.dir={path.parent}: cannot make a run directory there: {error.strerror}; "
            f"{other_place(error)}"
        ) from error
    finally:
        if not is_made:
            shutil.rmtree(draft, ignore_errors=True)
            # Innermost first; somebody may use those that were made for the draft by now.
            with contextlib.suppress(OSError):
                for folder in missing:
                    folder.rmdir()
    return is_made


def _is_moved(draft: Path, path: Path) -> bool:
    """Move the draft in place; a rename refuses a directory with files in it: no run is ever overwritten."""
    try:
        draft.rename(path)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def origin() -> dict[str, Any]:
    """Return what a run's record says of the process that prepares it and of the code, which is asked once
    for all members of a sweep.
    """
    process = processes.find(os.getpid())
    return {
        "created": time.time(),
        "host": socket.gethostname(),
        # Whoever prepares a run starts it, unless it is submitted: a run without an attempt and without this
        # process died.
        "pid": os.getpid(),
        "pid_started": None if process is None else process.started,
        "user": user_name(),
        "code_revision": code_revision(),
        "versions": {
            "orchestra": orchestra.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        "python": sys.executable,
    }
