"""The options that users of Hydra type, for `run`, `submit` and `plan`: --cfg, --info, --config-dir and more.

Here too the user's own defaults (`orchestra.config.home`) come in front of what is typed, and the folders of
presets that they name for all verbs that take overrides.
"""

from __future__ import annotations

import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.text import figures
from orchestra.cli.text.resolve import path_argument
from orchestra.config.descriptions import group_names
from orchestra.config.home import Home, chooses_cluster, home_file, read_home
from orchestra.errors import ConfigError

if TYPE_CHECKING:
    from orchestra.config.compose import Composed
    from orchestra.config.machine import Situation

_SEARCH_PATH = "hydra.searchpath="
# Options of Hydra's that mean something else here, and what to type.
_INSTEAD = {
    "--hydra-help": "Hydra itself is no part of it; `orchestra {verb} --help` and `orchestra config` explain",
    "--config-name": "take a preset of a group instead: experiment=NAME, model=NAME",
    "-cn": "take a preset of a group instead: experiment=NAME, model=NAME",
    "--config-path": "use --config-dir DIR for a folder of presets",
    "-cp": "use --config-dir DIR for a folder of presets",
    "--shell-completion": "`orchestra completion bash` (or zsh, fish) prints the script",
    "-sc": "`orchestra completion bash` (or zsh, fish) prints the script",
    "--install-completion": "`orchestra completion bash` (or zsh, fish) prints the script",
    "--experimental-rerun": "`orchestra resume RUN` goes on with a run",
}


class _Refused(Action):
    """An option of Hydra's that is refused with what to type instead."""

    def __call__(self, parser: ArgumentParser, _: Namespace, __: Any, option: str | None = None) -> None:
        assert option is not None
        verb = parser.prog.split()[-1]
        raise ConfigError(f"{option} is no option here: {_INSTEAD[option].format(verb=verb)}")


def add_hydra_options(parser: ArgumentParser) -> None:
    """Add --cfg, --resolve, --package, --info and --config-dir, and refuse others with what to type."""
    parser.add_argument(
        "-c",
        "--cfg",
        choices=("job",),
        help="print the configuration (job), with -m each member's, as YAML; start nothing",
    )
    parser.add_argument("--resolve", action="store_true", help="with --cfg: all values are resolved always")
    parser.add_argument("-p", "--package", metavar="KEY", help="with --cfg: print this part alone")
    parser.add_argument("--info", action="store_true", help="print where values come from; start nothing")
    add_config_dir(parser)
    for option in _INSTEAD:
        parser.add_argument(option, action=_Refused, nargs="?", help=SUPPRESS)


def add_config_dir(parser: ArgumentParser) -> None:
    """Add --config-dir."""
    parser.add_argument(
        *("--config-dir", "-cd"),
        type=path_argument,
        action="append",
        metavar="DIR",
        help="a folder with presets",
    )


def with_presets(arguments: Namespace) -> list[str]:
    """Return the overrides; where they take a preset, with the folders of --config-dir and the user's own
    defaults to look for it in. For verbs that change a run's frozen configuration: it has all other defaults.
    """
    takes_preset = any(text.lstrip("+").partition("=")[0] in group_names() for text in arguments.overrides)
    folders = [*(arguments.config_dir or ()), *(read_home().searchpath if takes_preset else ())]
    return with_search_path(arguments.overrides, folders)


def with_home(arguments: Namespace, verb: str = "run") -> list[str]:
    """Return the overrides behind the user's own defaults, as `orchestra run` has them, or another verb."""
    home = read_home()
    typed = with_search_path(arguments.overrides, [*(arguments.config_dir or ()), *home.searchpath])
    return home.overrides(typed, verb)


def answered(arguments: Namespace, verb: str) -> bool:
    """Put the user's defaults in front of the overrides; print what --cfg or --info ask for and return True
    where they are given.

    Raises ConfigError for what is wrong with the configuration or with the user's file.
    """
    home = read_home()
    for option, value in (("--resolve", arguments.resolve), ("--package", arguments.package)):
        if value and not arguments.cfg:
            meant = f"; a partition is cluster.partition={value}" if option == "--package" else ""
            raise ConfigError(f"{option} belongs to --cfg job; add that, or leave it out{meant}")
    # As it was typed: some of the planner's modes take no configuration, or then the run's own.
    arguments.typed = list(arguments.overrides)
    typed = with_search_path(arguments.overrides, [*(arguments.config_dir or ()), *home.searchpath])
    arguments.overrides = home.overrides(typed, verb)
    if not (arguments.cfg or arguments.info):
        return False
    if getattr(arguments, "multirun", False):
        _print_members(arguments, verb)
        return True
    composed = _composed(arguments.overrides, verb)
    if arguments.info:
        print("\n".join(_info(composed, home, arguments)))
    else:
        print(_shown(composed, arguments), end="")
    return True


def with_search_path(overrides: Sequence[str], folders: Sequence[str | Path]) -> list[str]:
    """Return overrides whose hydra.searchpath has `folders` after its own; one that cannot be read stays as
    it is, to be refused.
    """
    if not folders:
        return list(overrides)
    own = [text for text in overrides if text.lstrip("+").startswith(_SEARCH_PATH)]
    if own:
        from orchestra.config.overrides import searched_folders

        # The last one counts, as for any key.
        named = searched_folders(own[-1])
    else:
        named = []
    if named is None:
        return list(overrides)
    every = dict.fromkeys([*named, *(Path(folder).expanduser().absolute() for folder in folders)])
    quoted = ",".join("'" + str(folder).replace("'", "\\'") + "'" for folder in every)
    return [f"{_SEARCH_PATH}[{quoted}]", *(text for text in overrides if text not in own)]


def _composed(overrides: list[str], verb: str) -> Composed:
    from orchestra.config.compose import compose
    from orchestra.plan.assemble import for_planning

    if verb == "plan":
        overrides = for_planning(overrides)
    return compose(_on_cluster(overrides, verb), _situation(verb))


def _situation(verb: str) -> Situation:
    from orchestra.config.machine import Situation, this_machine

    return this_machine() if verb == "run" else Situation(verb)


def _on_cluster(overrides: list[str], verb: str) -> list[str]:
    if verb != "submit" or any(map(chooses_cluster, overrides)):
        return overrides
    return ["cluster=slurm", *overrides]


def _print_members(arguments: Namespace, verb: str) -> None:
    """Print the configuration of each member of a sweep, a YAML document each."""
    from orchestra.config.sweep import compose_members
    from orchestra.submit.sweeps.sweeper import names_sweeper

    if arguments.info:
        raise ConfigError(
            "--info is about one configuration, and -m makes several; leave -m out and give one value of "
            "each key, or see the configuration of every member with --cfg job"
        )
    if names_sweeper(arguments.overrides):
        raise ConfigError(
            "--cfg job: what a sweeper chooses depends on the results of the trials before; leave "
            "hydra/sweeper out to see the members of a plain sweep"
        )
    members = compose_members(_on_cluster(arguments.overrides, verb), _situation(verb))
    for index, member in enumerate(members):
        title = " ".join([f"# {index:03d}", *member.chosen])
        print(f"---\n{title}\n{_shown(member, arguments)}", end="")


def _shown(composed: Composed, arguments: Namespace) -> str:
    from orchestra.run.config_file import plain_values, values_to_yaml

    values: Any = plain_values(composed.config)
    for name in (arguments.package or "").split(".") if arguments.package else ():
        if not isinstance(values, dict) or name not in values:
            raise ConfigError(f"--package {arguments.package}: no such key; `orchestra config` lists all")
        values = values[name]
    return values_to_yaml(values)


def _info(composed: Composed, home: Home, arguments: Namespace) -> Iterable[str]:
    file = home_file()
    said = "says nothing" if home == Home() else ", ".join(_said(home))
    path = next((text for text in arguments.overrides if text.startswith(_SEARCH_PATH)), None)
    yield f"home       {file}{f': {said}' if file.exists() else ' is not there'}"
    yield f"presets    {'those of orchestra' if path is None else f'those of orchestra, then {path}'}"
    groups = (group for group in group_names() if group in composed.presets)
    taken = " ".join(f"{group}={composed.presets[group]}" for group in groups)
    yield textwrap.fill(f"taken      {taken}", figures.WIDTH, subsequent_indent=" " * 11)
    yield f"overrides  {' '.join(arguments.overrides) or 'none'}"


def _said(home: Home) -> Iterable[str]:
    for name, value in vars(home).items():
        if value:
            yield f"{name}={value if isinstance(value, str) else '[' + ', '.join(value) + ']'}"
