"""`orchestra plan [overrides]`: memory, speed and cost of a configuration before it runs.

Each further mode is asked for by an option and listed in `MODES`. No cluster is asked and no torch is loaded.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from orchestra.cli.hydra_options import add_hydra_options, answered
from orchestra.cli.plan import (
    Mode,
    check_target,
    exact_mode,
    explain_mode,
    file_modes,
    goodput_mode,
    one_layout,
    option_of,
    scan_mode,
    search_mode,
    tokens_mode,
)
from orchestra.cli.text.resolve import path_argument
from orchestra.errors import EXIT_DONE, ConfigError

_EXPLAINED = """\
  orchestra plan model=llama3_8b --tokens 1e12
  orchestra plan model=llama3_8b parallelism=zero3 train.seq_len=8192
  orchestra plan experiment=llama3_70b cluster.nodes=128 --json
  orchestra plan --table layouts.csv --output predicted.csv

Where no cluster is chosen it plans for nodes of 8 H100 on Slurm; cluster.nodes, cluster.gpus_per_node and
cluster.hardware say otherwise. The trainer's profile is orchestra's; --framework takes another's.
"""

_SCRIPT_EXPLAINED = """\
--script prints the batch script as `orchestra submit --dry-run` does: for the cluster that this machine
belongs to, whose numbers take the place of what is not given.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    parser.add_argument("--framework", metavar="NAME", help="whose kernels and habits (default: orchestra)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    parser.add_argument(
        "--report", type=path_argument, metavar="FILE", help="draw it, or a --search, on an HTML page as well"
    )
    add_hydra_options(parser)
    for mode in MODES:
        mode.add_arguments(parser)
    parser.epilog = "\n".join([_EXPLAINED, *(mode.explained for mode in MODES)])


def run(arguments: Namespace) -> int:
    """Print the prediction, or do what an option asks for, and return the exit code."""
    if answered(arguments, "plan"):
        return EXIT_DONE
    empty = [option_of(name) for name, value in vars(arguments).items() if value == ""]
    if empty:
        raise ConfigError([f"{option} is empty; give a value, or leave it out" for option in empty])
    asked = [mode for mode in MODES if _is_given(arguments, mode.name)]
    if len(asked) > 1:
        names = " and ".join(option_of(mode.name) for mode in asked)
        raise ConfigError(f"{names} are different things to do; give one of them")
    taken = asked[0].options if asked else ()
    for name in (name for mode in MODES for name in mode.options):
        if _is_given(arguments, name) and name not in taken:
            takers = " or ".join(option_of(mode.name) for mode in MODES if name in mode.options)
            raise ConfigError(f"{option_of(name)} belongs to {takers}; leave it out or add that")
    if arguments.report is not None:
        if asked and asked[0] is not search_mode.MODE:
            raise ConfigError(f"--report draws one layout or a --search, not {option_of(asked[0].name)}")
        check_target("--report", arguments.report)
    return asked[0].run(arguments) if asked else one_layout.run(arguments)


def _is_given(arguments: Namespace, name: str) -> bool:
    # 0 is given, and equals False.
    value = getattr(arguments, name)
    return value is not None and value is not False


def _add_script(parser: ArgumentParser) -> None:
    parser.add_argument("--script", action="store_true", help="print the exact sbatch script")


def _print_script(arguments: Namespace) -> int:
    """Print what `orchestra submit --dry-run` prints. Raises ConfigError for what could not be submitted."""
    from orchestra.cli.run import submit_command

    if arguments.framework:
        raise ConfigError(
            f"--framework {arguments.framework}: what is submitted is orchestra's; leave it out"
        )
    # What does not fit is planned all the same.
    arguments.skip_memory_check, arguments.after = True, []
    return submit_command.print_script(arguments)


MODES = (
    *(search_mode.MODE, tokens_mode.MODE, explain_mode.MODE, goodput_mode.MODE, scan_mode.MODE),
    *(file_modes.TABLE, exact_mode.MODE, file_modes.CALIBRATE),
    Mode("script", _SCRIPT_EXPLAINED, _add_script, _print_script),
)
