"""Makes the run directory: a name, the frozen configuration and the run's record, all at once or not at all.

It checks no configuration (orchestra.config.rules does) and starts nothing.
"""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orchestra
from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.frozen import write_config
from orchestra.rundir import RunDir
from orchestra.submit.environment import source_root
from orchestra.submit.revision import code_revision

# What Weights & Biases accepts as an id, and short enough to be typed.
_WANDB_ID_BYTES = 4


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
    """Return the directory that the run would get. Raises ConfigError when something is in its place."""
    run = RunDir(Path(request.config.run.dir).expanduser().absolute() / run_name(request, now))
    if os.path.lexists(run.path):
        raise ConfigError(_taken(run))
    return run


def _taken(run: RunDir) -> str:
    return (
        f"run.name={run.name}: {run.path} exists already; choose another run.name, leave it out to have one "
        f"made, or remove that directory"
    )


def frozen_config(request: RunRequest, run: RunDir) -> Config:
    """Return the configuration as the run directory keeps it: with the run's name and place."""
    identity = dataclasses.replace(request.config.run, name=run.name, dir=str(run.path.parent))
    return dataclasses.replace(request.config, run=identity)


def prepare(request: RunRequest, run: RunDir) -> None:
    """Write the run directory `run`: config.yaml and run.json. Any moment before the end leaves nothing in
    its place.

    Raises ConfigError when the name is taken meanwhile or the parent cannot be written.
    """
    draft = RunDir(run.path.with_name(f".{run.name}.{secrets.token_hex(4)}"))
    try:
        draft.path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={run.path.parent}: cannot make a directory there: {error.strerror}; "
            f"choose another run.dir"
        ) from error
    try:
        write_config(draft.config, frozen_config(request, run))
        draft.record.write_text(json.dumps(_record(request, run), indent=2) + "\n")
        _claim(draft, run)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise


def _claim(draft: RunDir, run: RunDir) -> None:
    """Move the draft in place; a rename refuses a directory with files in it: no run is ever overwritten."""
    try:
        draft.path.rename(run.path)
    except OSError as error:
        raise ConfigError(_taken(run)) from error


def _record(request: RunRequest, run: RunDir) -> dict[str, Any]:
    revision = code_revision(source_root())
    return {
        "name": run.name,
        "signature": request.signature,
        "overrides": list(request.overrides),
        "command": list(request.command),
        "created": time.time(),
        "host": socket.gethostname(),
        "user": _user(),
        "code_revision": None if revision is None else dataclasses.asdict(revision),
        "versions": {
            "orchestra": orchestra.__version__,
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        "python": sys.executable,
        "wandb_id": secrets.token_hex(_WANDB_ID_BYTES),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user id without a name.
        return str(os.getuid())
