"""From what a user typed to a run directory: a path, a name, or the unique start of one. Reads no records."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser
from pathlib import Path

from orchestra.errors import ConfigError
from orchestra.report.state import is_run
from orchestra.rundir import RunDir

_NEAREST = 3
_CANDIDATES = 8


def add_directory_option(parser: ArgumentParser) -> None:
    """Add --dir, the parent of run directories (a run's `run.dir`)."""
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where the runs lie: the run.dir they were started with (default: %(default)s)",
    )


def all_runs(parent: Path) -> list[RunDir]:
    """Return the runs in `parent`, newest first. Raises ConfigError when it cannot be read."""
    try:
        paths = [path for path in parent.iterdir() if not path.name.startswith(".") and is_run(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"--dir {parent}: cannot be listed: {error.strerror}") from error
    return [RunDir(path) for path in sorted(paths, key=_created, reverse=True)]


def _created(path: Path) -> tuple[float, str]:
    # run.json is written when the run is made and when it is resumed.
    try:
        return (RunDir(path).record.stat().st_mtime, path.name)
    except OSError:
        return (0.0, path.name)


def resolve(text: str, parent: Path) -> RunDir:
    """Return the run that `text` means. Raises ConfigError with the candidates or the nearest names."""
    path = Path(text).expanduser()
    is_path = path.is_absolute() or len(path.parts) > 1 or text.startswith(".")
    if is_path and is_run(path):
        return RunDir(path.absolute())
    if is_path:
        found = "has neither run.json nor config.yaml" if path.exists() else "does not exist"
        raise ConfigError(f"RUN {text}: the directory {found}; give a run's name or its directory")
    names = [run.name for run in all_runs(parent)]
    matching = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(matching) == 1:
        return RunDir((parent / matching[0]).absolute())
    raise ConfigError(_several(text, matching) if matching else _none(text, names, parent))


def _several(text: str, matching: list[str]) -> str:
    more = f" and {len(matching) - _CANDIDATES} more" if len(matching) > _CANDIDATES else ""
    names = ", ".join(matching[:_CANDIDATES])
    return f"RUN {text}: {len(matching)} runs start so: {names}{more}; type more of the name"


def _none(text: str, names: list[str], parent: Path) -> str:
    if not names:
        return f"RUN {text}: there is no run in {parent}; pass --dir if they lie elsewhere"
    near = difflib.get_close_matches(text, names, n=_NEAREST, cutoff=0.3) or names[:_NEAREST]
    return f"RUN {text}: no run in {parent} is called so; the nearest are {', '.join(near)}"
