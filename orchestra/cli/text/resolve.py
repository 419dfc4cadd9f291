"""From what a user typed to a run or a sweep: a path, a name, or the unique start of one.

SWEEP/3 is the sweep's member with index 3. It reads no records but a sweep's, for its members.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.text.figures import number_of
from orchestra.config.home import run_folder
from orchestra.errors import ConfigError
from orchestra.report.run_state import is_run
from orchestra.run.paths import RunDir, SweepDir, is_sweep, read_sweep
from orchestra.run.run_folders import remember, remembered
from orchestra.sizes.units import first_few

# Help of a RUN that may be a sweep.
TARGET_HELP = "name of a run or a sweep, unique start of one, path, or SWEEP/3"
_NEAREST = 3
_CANDIDATES = 8

Target = RunDir | SweepDir


def path_argument(text: str) -> Path:
    """Return the path that an option names, for argparse. An empty one is none: Path takes it for `.`."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; give a path, or leave the option out")
    return Path(text)


def add_directory_option(parser: ArgumentParser) -> None:
    """Add --dir, the parent of run directories (a run's `run.dir`)."""
    parser.add_argument(
        "--dir",
        type=path_argument,
        default=run_folder(),
        metavar="DIR",
        help="where the runs lie: the run.dir they were started with (default: %(default)s)",
    )


def elsewhere(parent: Path) -> list[Target]:
    """Return the runs and sweeps in other folders that are remembered, where `parent` is the usual one."""
    if parent.absolute() != run_folder().absolute():
        return []
    found: list[Target] = []
    for folder in remembered():
        # One that cannot be read now is none of this question's.
        with contextlib.suppress(ConfigError):
            found += all_targets(folder) if folder != parent.absolute() else []
    return found


def all_targets(parent: Path) -> list[Target]:
    """Return the runs and sweeps in `parent`, newest first. Raises ConfigError when it cannot be read."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"--dir {parent}: cannot be listed: {error.strerror}") from error
    dated = [target for name in names if (target := _dated(parent / name)) is not None]
    newest_first = sorted(dated, key=lambda entry: (entry[0], entry[1].name), reverse=True)
    return [target for _, target in newest_first]


def _dated(path: Path) -> tuple[float, Target] | None:
    """Return a run or a sweep and when its record was written: when it is made, submitted and resumed."""
    run, sweep = RunDir(path), SweepDir(path)
    for file, target in ((run.record, run), (sweep.record, sweep), (run.config, run)):
        try:
            return file.stat().st_mtime, target
        except OSError:
            continue
    return None


def resolve(text: str, parent: Path, *, takes_dir: bool = True) -> RunDir:
    """Return the run that `text` means, which may be a sweep's member. `takes_dir`: the command has --dir.

    Raises ConfigError with the candidates or the nearest names; for a sweep it says how to name a member.
    """
    target = resolve_target(text, parent, takes_dir=takes_dir)
    if isinstance(target, RunDir):
        return target
    members = read_sweep(target).members
    names = [f"{target.name}/{member.index:03d}" for member in members]
    listed = ", ".join(names if len(names) <= _NEAREST else [*names[:2], "…", names[-1]])
    raise ConfigError(
        f"RUN {text}: {target.name} is a sweep of {number_of(len(members), 'run')}; "
        f"name one of them: {listed} "
        f"(`orchestra status {target.name}` lists them)"
    )


def resolve_target(text: str, parent: Path, *, takes_dir: bool = True) -> Target:
    """Return the run or the sweep that `text` means; a member of a sweep is its run.

    Raises ConfigError with the candidates or the nearest names.
    """
    if not text.strip():
        raise ConfigError("RUN is empty; give a run's name, the unique start of one, or its directory")
    try:
        return _meant(text, parent, takes_dir)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ConfigError(f"RUN {text}: {reason}; give a run's name or its directory") from error


def _meant(text: str, parent: Path, takes_dir: bool) -> Target:
    path = Path(text).expanduser()
    is_path = path.is_absolute() or len(path.parts) > 1 or text.startswith(".")
    if not is_path:
        return _named(text.rstrip("/"), parent, takes_dir)
    if is_sweep(path):
        return SweepDir(path.absolute())
    if is_run(path):
        return RunDir(path.absolute())
    head, _, last = text.rstrip("/").rpartition("/")
    if last.isdecimal() and (sweep := _sweep_called(head, parent)) is not None:
        return _member(text, sweep, int(last))
    problem = "the directory does not exist"
    if path.exists():
        lacks = "the directory has neither run.json, sweep.json nor config.yaml"
        problem = lacks if path.is_dir() else "it is no directory"
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(
                f"RUN {text}: the directory is closed to you; its owner opens it with "
                "`chmod go+rX`, or to a Unix group from the start with run.group"
            )
    raise ConfigError(f"RUN {text}: {problem}; give a run's name or its directory")


def _listed(parent: Path) -> tuple[list[Target], ConfigError | None]:
    """Return what lies in a folder, or why it cannot be listed: what is remembered elsewhere may be meant."""
    try:
        return all_targets(parent), None
    except ConfigError as error:
        return [], error


def _named(text: str, parent: Path, takes_dir: bool) -> Target:
    targets, problem = _listed(parent)
    if matching := _matching(text, targets):
        if len(matching) > 1:
            raise _several(text, [target.name for target in matching])
        remember(parent)
        kind = type(matching[0])
        return kind((parent / matching[0].name).absolute())
    if matching := _matching(text, elsewhere(parent)):
        if len(matching) > 1:
            raise _several(text, [str(target.path) for target in matching])
        return matching[0]
    if problem is not None:
        raise problem
    if not targets:
        advice = "pass --dir if they lie elsewhere" if takes_dir else "give its path if it lies elsewhere"
        raise ConfigError(f"RUN {text}: there is no run in {parent}; {advice}")
    names = [target.name for target in targets]
    near = difflib.get_close_matches(text, names, n=_NEAREST, cutoff=0.3)
    listed = f"nearest are {', '.join(near)}" if near else f"newest are {', '.join(names[:_NEAREST])}"
    raise ConfigError(f"RUN {text}: no run in {parent} has this name; the {listed}")


def _matching(text: str, targets: Sequence[Target]) -> list[Target]:
    """Return the targets of this name, else those whose names begin so."""
    exact = [target for target in targets if target.name == text]
    return exact or [target for target in targets if target.name.startswith(text)]


def _sweep_called(text: str, parent: Path) -> SweepDir | None:
    """Return the sweep that the part before a member's number means; None where it means none."""
    if is_sweep(Path(text).expanduser()):
        return SweepDir(Path(text).expanduser().absolute())
    if "/" in text or not text:
        return None
    here, problem = _listed(parent)
    for targets in (here, elsewhere(parent)):
        sweeps = [target for target in targets if isinstance(target, SweepDir)]
        if matching := _matching(text, sweeps):
            if len(matching) > 1:
                raise _several(text, [target.name for target in matching])
            return SweepDir(matching[0].path.absolute())
    if problem is not None:
        raise problem
    return None


def _member(text: str, sweep: SweepDir, index: int) -> RunDir:
    record = read_sweep(sweep)
    for member in record.members:
        if member.index == index:
            return record.run(sweep, member)
    last = max((member.index for member in record.members), default=-1)
    raise ConfigError(
        f"RUN {text}: {sweep.name} has no member {index}; its members are {sweep.name}/000 to "
        f"{sweep.name}/{last:03d}"
    )


def _several(text: str, matching: list[str]) -> ConfigError:
    names = first_few(matching, _CANDIDATES)
    return ConfigError(f"RUN {text}: {len(matching)} runs have names that start so: {names}; type more of it")
