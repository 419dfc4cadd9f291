"""`orchestra plan --script [overrides]`: the exact batch script that `orchestra submit` would hand to Slurm.

It is `orchestra submit --dry-run` by the name under which whoever plans looks for it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from orchestra.errors import ConfigError

NAME = "script"
OPTIONS: tuple[str, ...] = ()
EXPLAINED = """\
--script prints the batch script as `orchestra submit --dry-run` does: for the cluster that this machine
belongs to, whose numbers take the place of what is not given.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --script."""
    parser.add_argument("--script", action="store_true", help="print the exact sbatch script")


def run(arguments: Namespace) -> int:
    """Print the script and return 0. Raises ConfigError for what could not be submitted."""
    from orchestra.cli import submit_command

    if arguments.framework:
        raise ConfigError(
            f"--framework {arguments.framework}: what is submitted is orchestra's; leave it out"
        )
    # What does not fit is planned all the same.
    arguments.skip_memory_check = True
    return submit_command.print_script(arguments)
