"""The other things that `orchestra plan` does, each asked for by an option, and what they share."""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config, LauncherName
from orchestra import __version__
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, chooses_cluster, for_planning
from orchestra.plan.case import PlanCase
from orchestra.plan.frameworks import OWN
from orchestra.report.page.html_page import html_page
from orchestra.run.files import write_atomically
from orchestra.submit.network_bench import with_measured_network


@dataclass(frozen=True)
class Mode:
    """One thing to do. `name` is the option that asks for it and `options` are those that only it takes, both
    as argparse names them; `explained` is a paragraph of the help.

    `add_arguments` adds all of these and loads nothing slow. `run` returns the exit code, and raises
    OrchestraError for what ends the command otherwise.
    """

    name: str
    explained: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    options: tuple[str, ...] = ()


def option_of(name: str) -> str:
    """Return an option as it is typed."""
    return "--" + name.replace("_", "-")


def configuration(overrides: Sequence[str]) -> Config:
    """Return what overrides mean where nothing is trained. Raises ConfigError for what is wrong with them."""
    return with_network(compose(for_planning(overrides), Situation("plan")).config, overrides)


def with_network(config: Config, typed: Sequence[str]) -> Config:
    """Return the configuration with what `bench network` measured of its cluster of Slurm, where `typed`
    chooses one: usual machines that are assumed have a usual network.
    """
    is_chosen = config.cluster.launcher is LauncherName.slurm and chooses_cluster(typed)
    return with_measured_network(config) if is_chosen else config


def case_for(config: Config, arguments: Namespace) -> PlanCase:
    """Return the case of a configuration for the trainer that --framework names, usually orchestra's own."""
    return case_of(config, arguments.framework or OWN)


def refuse_configuration(option: str, source: str, arguments: Namespace, *others: str) -> None:
    """Raise ConfigError where overrides, --framework or `others` stand beside an option that takes none."""
    framework = [f"--framework {arguments.framework}"] if arguments.framework is not None else []
    words = [*arguments.typed, *others, *framework]
    if words:
        raise ConfigError(f"{option} takes everything from {source}; leave out {' '.join(words)}")


def print_result(
    arguments: Namespace, facts: Callable[[], object], lines: Callable[[], Iterable[str]]
) -> None:
    """Print one JSON object with --json, else the lines for people; with --report draw the object too."""
    print(json.dumps(facts(), indent=2) if arguments.json else "\n".join(lines()))
    if arguments.report is not None:
        data = {"plan": facts(), "made": time.time(), "orchestra": __version__}
        write_atomically(arguments.report, html_page("orchestra plan", data), is_synced=False)


def check_target(option: str, target: Path) -> None:
    """Raise ConfigError where `target`, which an option names, cannot become a file: before any work."""
    folder = target.parent
    if target.is_dir():
        problem = "it is a folder; give a file's name"
    elif not folder.exists():
        problem = f"there is no folder {folder}; make it, or give another file"
    elif not folder.is_dir():
        problem = f"{folder} is no folder; give another file"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"nothing can be written in {folder}; give another file"
    else:
        return
    raise ConfigError(f"{option} {target}: {problem}")
