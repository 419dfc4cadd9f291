"""The command: finds the verb, runs it, and turns what ends it into one line and an exit code.

A verb is a module with `add_arguments(parser)` and `run(arguments) -> exit code`. Only the module of the
verb that was asked for is imported, and none of them imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from orchestra import __version__
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, OrchestraError

_ERROR = "error: "


class VerbModule(Protocol):
    """What the module of a verb offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the verb's arguments, and whatever its --help explains."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code. Raises OrchestraError for what ends it otherwise."""


@dataclass(frozen=True)
class Verb:
    """A verb as the help lists it: one or two words, where it lives, what it does."""

    name: str
    module: str
    summary: str


VERBS = (
    Verb("run", "orchestra.cli.run_command", "train on this machine, in the foreground"),
    Verb("submit", "orchestra.cli.submit_command", "check, freeze and submit a Slurm job, and exit"),
    Verb(
        "plan", "orchestra.cli.plan_command", "predict memory, speed and cost of a configuration or a table"
    ),
    Verb("resume", "orchestra.cli.resume_command", "train a run on, from its newest checkpoint"),
    Verb("status", "orchestra.cli.status_command", "list runs: state, step, loss, tokens/s, MFU, time left"),
    Verb("cancel", "orchestra.cli.cancel_command", "stop runs after their current step, with a checkpoint"),
    Verb("logs", "orchestra.cli.logs_command", "print or follow the logs of a run"),
    Verb("why", "orchestra.cli.why_command", "tell what ended a run: first failing rank, host, traceback"),
    Verb(
        "rehearse", "orchestra.cli.rehearse_command", "inject faults into a short copy of a run, and judge it"
    ),
    Verb("checkpoint ls", "orchestra.cli.checkpoint.ls_command", "list the checkpoints of a run"),
    Verb("checkpoint verify", "orchestra.cli.checkpoint.verify_command", "check every byte of a checkpoint"),
    Verb(
        "checkpoint export", "orchestra.cli.checkpoint.export_command", "write a checkpoint for Hugging Face"
    ),
    Verb(
        "checkpoint import",
        "orchestra.cli.checkpoint.import_command",
        "check a Hugging Face folder to start from",
    ),
    Verb("data pack", "orchestra.cli.data_command", "turn text into token files"),
    Verb("doctor", "orchestra.cli.doctor_command", "check this machine and the cluster"),
    Verb(
        "bench network", "orchestra.cli.bench_network_command", "measure bandwidth inside and between nodes"
    ),
)


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit, and never guesses abbreviations."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `orchestra ARGV…` and return its exit code (see orchestra.errors)."""
    _make_streams_safe()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except OrchestraError as error:
        _complain(error.problems if isinstance(error, ConfigError) else [str(error)])
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        return EXIT_DONE
    except OSError as error:
        reason = error.strerror or str(error)
        _complain([reason if error.filename is None else f"{error.filename}: {reason}"])
        return EXIT_FAILED
    finally:
        _flush_or_drop()


def _make_streams_safe() -> None:
    """Let no character that a stream cannot encode, and no stream that was closed (`>&-`), end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w")))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flush_or_drop() -> None:
    """Drop what cannot be written: Python flushes once more at exit, and would change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(problems: Sequence[str]) -> None:
    with contextlib.suppress(OSError):
        for problem in problems:
            print(_ERROR + problem.replace("\n", "\n" + " " * len(_ERROR)), file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return EXIT_DONE if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version", "version"):
        print(f"orchestra {__version__}")
        return EXIT_DONE
    verb, rest = _find(argv)
    module = cast(VerbModule, importlib.import_module(verb.module))
    parser = Parser(f"orchestra {verb.name}", verb.summary[0].upper() + verb.summary[1:] + ".")
    module.add_arguments(parser)
    try:
        # Options and positional arguments in any order.
        arguments = parser.parse_intermixed_args(rest)
    except SystemExit:
        # Only --help ends the parser: errors are ConfigErrors.
        return EXIT_DONE
    return module.run(arguments)


def _find(argv: list[str]) -> tuple[Verb, list[str]]:
    for verb in VERBS:
        words = verb.name.split()
        if argv[: len(words)] == words:
            return verb, argv[len(words) :]
    raise ConfigError(_unknown(argv))


def _unknown(argv: list[str]) -> str:
    import difflib

    if argv[0].startswith("-"):
        return f"orchestra takes a verb first, found {argv[0]}; see `orchestra --help`"
    inner = [verb.name for verb in VERBS if verb.name.split()[0] == argv[0]]
    if inner:
        return (
            f"orchestra {' '.join(argv[:2])}: expected {' or '.join(f'`orchestra {name}`' for name in inner)}"
        )
    names = [verb.name for verb in VERBS]
    near = difflib.get_close_matches(argv[0], names, n=1, cutoff=0.5)
    advice = f"did you mean `orchestra {near[0]}`?" if near else f"the verbs are {', '.join(names)}"
    return f"orchestra has no verb {argv[0]!r}; {advice}"


def _help() -> str:
    width = max(len(verb.name) for verb in VERBS)
    verbs = "\n".join(f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS)
    return (
        "usage: orchestra VERB [arguments]\n\n"
        "Trains language models; every verb explains itself with --help.\n\n"
        f"{verbs}\n\n"
        "A RUN is the name of a run, the unique start of one, or a path.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong configuration or usage (nothing was started),\n"
        "75 stopped on request, to be continued, 93 starting again would not help, 130 interrupted."
    )
