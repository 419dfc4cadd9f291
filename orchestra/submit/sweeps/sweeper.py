"""Runs a third-party Hydra sweeper, such as Optuna's: each batch of its trials becomes a sweep of ours.

`orchestra submit -m hydra/sweeper=NAME hydra.sweeper.x=y KEY=interval(…)`: the sweeper chooses values, its
batch is submitted and waited for, and it gets every trial's metric back. It knows no sweeper by name.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.config.machine import Situation
from orchestra.config.rules.value_rules import rule_metric, rule_run_name
from orchestra.errors import ConfigError, OrchestraError
from orchestra.report.run_state import name_of
from orchestra.submit.wait import RunResult

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from conf.schema import RunConfig
    from orchestra.config.compose import Composed

# Trains the members of one batch as a sweep of this name, and returns in the members' order how each ended.
TrainMembers = Callable[[list["Composed"], str], list[RunResult]]

_NAMES_SWEEPER = "hydra/sweeper="
# Settings of Hydra's that are for the sweeper, and the one that is for the configuration tree.
_OF_SWEEPER = ("hydra/sweeper", "hydra.sweeper")
_SEARCH_PATH = "hydra.searchpath"
# Of the 100 characters of a run's name some are left for the number of the batch.
_LONGEST_NAME = 85


def names_sweeper(overrides: Sequence[str]) -> bool:
    """Tell whether overrides choose one of Hydra's sweepers instead of our own expansion."""
    return any(_bare(text).startswith(_NAMES_SWEEPER) for text in overrides)


@dataclass(frozen=True)
class Trial:
    """One choice of a sweeper: what it chose, and how the run ended; no result where it was refused."""

    chosen: tuple[str, ...]
    result: RunResult | None


@dataclass
class _Session:
    """What the launcher needs while a sweeper runs."""

    name: str
    situation: Situation
    train_members: TrainMembers
    fixed: dict[str, str]
    folders: tuple[str, ...]
    trials: list[Trial] = field(default_factory=list)
    batches: int = 0


_SESSION: ContextVar[_Session] = ContextVar("orchestra_sweeper")


def run_sweeper(overrides: Sequence[str], situation: Situation, train_members: TrainMembers) -> list[Trial]:
    """Let the sweeper that `overrides` name choose, and train, until it has enough; return its trials.

    Batch number b is the sweep NAME-batch-b; what the sweeper itself writes goes to the folder NAME beside
    them. Raises ConfigError for overrides that are wrong and for an unknown sweeper, OrchestraError when the
    sweeper gives up because of a trial.
    """
    checked = _check(overrides)
    run = _run_section(checked)
    name = run.name or time.strftime("sweep-%Y%m%d-%H%M%S")
    if len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"run.name={name}: the batches of a sweeper are called by it and a number; use up to "
            f"{_LONGEST_NAME} characters"
        )
    place = Path(run.dir).expanduser().absolute() / name
    # Hydra's own launchers make it, and sweepers write their results there.
    place.mkdir(parents=True, exist_ok=True)
    quoted = str(place).replace("'", "\\'")
    session = _Session(name, situation, train_members, checked.fixed, checked.folders)
    token = _SESSION.set(session)
    try:
        with _logged_to_stderr():
            _sweep([*checked.for_hydra, "hydra/launcher=orchestra", f"hydra.sweep.dir='{quoted}'"])
    finally:
        _SESSION.reset(token)
    return session.trials


@dataclass(frozen=True)
class _Checked:
    """A sweeper's overrides as Hydra takes them, and those that stay the same in all trials as typed."""

    for_hydra: list[str]
    # By their key as Hydra hands it on, with its prefix (as in `++a.b`).
    fixed: dict[str, str]
    # Those that choose folders of presets; no sweeper hands them on.
    folders: tuple[str, ...]


def _bare(text: str) -> str:
    return text.lstrip("+~")


def _check(overrides: Sequence[str]) -> _Checked:
    """Check what can be checked before the sweeper chooses: syntax, keys, types of what is given."""
    from orchestra.config.overrides import accepted_text, check_overrides, parse_overrides
    from orchestra.config.sweep import common_key_problem

    of_sweeper = [text for text in overrides if _bare(text).startswith(_OF_SWEEPER)]
    parsed = parse_overrides([text for text in overrides if text not in of_sweeper])
    swept = [override for override in parsed.overrides if override.is_sweep_override()]
    given = [str(override.input_line) for override in parsed.overrides if override not in swept]
    checked = check_overrides(given)
    problems = [*parsed.problems, *checked.problems]
    problems += [problem for problem in map(common_key_problem, swept) if problem is not None]
    if problems:
        raise ConfigError(problems)
    keys = [override.get_key_element() for override in parse_overrides(checked.accepted).overrides]
    fixed = {key: text for key, text in zip(keys, given, strict=True) if _bare(key) != _SEARCH_PATH}
    folders = tuple(text for key, text in zip(keys, given, strict=True) if _bare(key) == _SEARCH_PATH)
    return _Checked([*of_sweeper, *checked.accepted, *map(accepted_text, swept)], fixed, folders)


def _run_section(checked: _Checked) -> RunConfig:
    """Return name, folder and metric, which all trials share; other rules need a trial's values."""
    from orchestra.config.compose import merge, typed
    from orchestra.config.overrides import check_overrides

    config = typed(merge(check_overrides([*checked.folders, *checked.fixed.values()]))[0])
    situation = Situation()
    if problems := [*rule_run_name(config, situation), *rule_metric(config, situation)]:
        raise ConfigError(problems)
    return config.run


def _sweep(overrides: list[str]) -> None:
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from orchestra.config.compose import in_one_line
    from orchestra.config.preset_files import own_folder
    from orchestra.run.config_file import writable_schema

    _register_launcher()
    ConfigStore.instance().store(name="schema", node=writable_schema())
    with hydra.initialize_config_dir(str(own_folder()), job_name="orchestra", version_base="1.3"):
        whole = GlobalHydra.instance().hydra
        assert whole is not None
        try:
            # What a trial does is the job's matter, and no function of Hydra's.
            whole.multirun("train", lambda _: None, overrides, with_log_configuration=False)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(in_one_line(error)) from error


def _register_launcher() -> None:
    """Make the plugin known where the packages are used from their folder and not installed."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher

    names = {plugin.__name__ for plugin in Plugins.instance().discover(Launcher)}
    if "OrchestraLauncher" in names:
        return
    sys.path.append(str(Path(__file__).resolve().parents[3] / "launchers" / "plugin"))
    plugin = importlib.import_module("hydra_plugins.orchestra_launcher")
    Plugins.instance().register(plugin.OrchestraLauncher)


@contextlib.contextmanager
def _logged_to_stderr() -> Iterator[None]:
    """Show what a sweeper logs: Hydra would set logging up, for standard output and a file."""
    logger, handler = logging.getLogger("hydra_plugins"), logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def launch_trials(batch: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """Submit a batch of a sweeper's choices as one sweep, wait for it, and return Hydra's record of each.

    A trial whose configuration is refused, or whose run did not finish, has failed: the sweeper decides what
    that means. Raises ConfigError where no sweep of ours is going on.
    """
    session = _SESSION.get(None)
    if session is None:
        raise ConfigError(
            "hydra/launcher=orchestra submits the runs of `orchestra submit -m hydra/sweeper=NAME …`, and of "
            "no other application"
        )
    choices = [_as_typed(session, overrides) for overrides in batch]
    with _sweeper_set_aside():
        members = _members(session, choices)
    accepted = [member for member in members if not isinstance(member, ConfigError)]
    results = iter(_results(session, accepted))
    returns = []
    for number, (member, (_, chosen)) in enumerate(zip(members, choices, strict=True), first):
        end = member if isinstance(member, ConfigError) else next(results)
        session.trials.append(Trial(chosen, None if isinstance(end, ConfigError) else end))
        returns.append(_job_return(number, chosen, end))
    return returns


@contextlib.contextmanager
def _sweeper_set_aside() -> Iterator[None]:
    """Let our own composing have Hydra to itself: it takes one application at a time."""
    from hydra.core.global_hydra import GlobalHydra

    everywhere = GlobalHydra.instance()
    sweeping, everywhere.hydra = everywhere.hydra, None
    try:
        yield
    finally:
        everywhere.hydra = sweeping


def _as_typed(session: _Session, overrides: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return a trial's overrides, those that do not vary as they were typed, and the chosen ones alone."""
    varied = [text for text in overrides if text.partition("=")[0] not in session.fixed]
    return [*session.folders, *session.fixed.values(), *varied], tuple(varied)


def _members(
    session: _Session, choices: Sequence[tuple[list[str], tuple[str, ...]]]
) -> Sequence[Composed | ConfigError]:
    """Compose the trials; where some are refused each alone, so that the others can be tried."""
    from orchestra.config.sweep import compose_batch

    keys = {text.partition("=")[0] for _, chosen in choices for text in chosen}

    def compose(some: Sequence[tuple[list[str], tuple[str, ...]]]) -> list[Composed]:
        return compose_batch([texts for texts, _ in some], keys, session.situation)

    try:
        return compose(choices)
    except ConfigError as all_problems:
        members: list[Composed | ConfigError] = []
        for choice in choices:
            try:
                members += compose([choice])
            except ConfigError as error:
                members.append(error)
        # What is wrong with every trial from the first is no matter of the values.
        if not session.trials and all(isinstance(member, ConfigError) for member in members):
            raise all_problems
        for member, (_, chosen) in zip(members, choices, strict=True):
            if isinstance(member, ConfigError):
                sys.stderr.write(f"refused: {' '.join(chosen)}: {'; '.join(member.problems)}\n")
        return members


def _results(session: _Session, members: list[Composed]) -> list[RunResult]:
    if not members:
        return []
    name = f"{session.name}-batch-{session.batches}"
    session.batches += 1
    sys.stderr.write(f"{name}: {len(members)} trial{'' if len(members) == 1 else 's'}\n")
    return session.train_members(members, name)


def _job_return(number: int, chosen: tuple[str, ...], end: RunResult | ConfigError) -> JobReturn:
    from hydra.core.utils import JobReturn, JobStatus

    trial = f"trial {number}"
    if isinstance(end, ConfigError):
        return JobReturn(chosen, None, None, None, trial, JobStatus.FAILED, end)
    if end.is_done:
        return JobReturn(chosen, None, None, str(end.run.path), trial, JobStatus.COMPLETED, end.value)
    name, why = name_of(end.run), end.cause or f"code {end.code}"
    error = OrchestraError(f"{trial}: {name} {end.state} ({why}); `orchestra why {name}` tells more")
    return JobReturn(chosen, None, None, None, trial, JobStatus.FAILED, error)
