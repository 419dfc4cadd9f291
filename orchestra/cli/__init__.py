"""The command: finds the verb, runs it, and turns what ends it into one line and an exit code.

A verb is a module `<verb>_command` with `add_arguments(parser)`, which also says what --help explains, and
`run(arguments)`, which returns the exit code or raises OrchestraError. Only the module of the verb that was
asked for is imported, and none of them imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from orchestra import __version__
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, OrchestraError
from orchestra.run.permissions import closed_to_others

_ERROR = "error: "
# What a shell's completion asks; no verb for people.
_COMPLETE = "__complete"


# What each verb does. The verb `data pack` is the module data/data_pack_command: where several begin with a
# word they share its folder; the others lie in the folder that _FOLDERS names, or here.
VERBS = {
    "run": "train on this machine, in the foreground",
    "submit": "check, freeze and submit a Slurm job, and exit",
    "plan": "predict memory, speed and cost of a configuration",
    "resume": "go on with a run from its newest checkpoint",
    "status": "list runs: state, step, loss, tokens/s, MFU, time left",
    "cancel": "stop runs after their current step, with a checkpoint",
    "logs": "print or follow the logs of a run",
    "why": "tell what ended a run: first failing rank, host, traceback",
    "report": "draw a run, several, or a sweep on one HTML page",
    "top": "show all runs or one, live in the terminal",
    "watch": "say when something is wrong with runs, here or by mail",
    "profile": "trace the next steps of a run that trains",
    "rehearse": "inject faults into a short copy of a run, and judge it",
    "eval": "measure a checkpoint's loss on held-out data",
    "generate": "sample text from a checkpoint",
    "checkpoint ls": "list the checkpoints of a run",
    "checkpoint verify": "check every byte of a checkpoint",
    "checkpoint export": "write a checkpoint for Hugging Face",
    "checkpoint import": "start from Hugging Face weights, or torch's (DCP)",
    "data pack": "turn text into token files",
    "data verify": "check every byte of token files",
    "config": "explain the keys and presets of a configuration",
    "completion": "print a script that completes commands in bash, zsh or fish",
    "doctor": "check this machine and the cluster",
    "site init": "write a site file from what Slurm and this machine say",
    "bench network": "measure bandwidth inside and between nodes",
}
# Where verbs of one word lie that belong together: those that change runs, and those that look at them.
_FOLDERS = {
    **dict.fromkeys(("run", "submit", "resume", "cancel", "rehearse"), "run."),
    **dict.fromkeys(("status", "logs", "why", "report", "top", "watch", "profile"), "look."),
}

# Verbs of other tools, and what to type instead.
INSTEAD = {
    **dict.fromkeys(("list", "ls", "ps", "squeue", "runs"), "`orchestra status` lists runs"),
    **dict.fromkeys(("show", "compare", "info", "diff"), "`orchestra status RUN…` shows runs together"),
    **dict.fromkeys(
        ("train", "start", "fit", "launch"), "`orchestra run` trains here, `orchestra submit` in a job"
    ),
    **dict.fromkeys(
        ("sweep", "multirun", "agent"),
        "`orchestra run -m KEY=A,B` trains a sweep here, `orchestra submit -m KEY=A,B` in jobs",
    ),
    **dict.fromkeys(("sbatch", "srun", "queue"), "`orchestra submit` submits a job"),
    **dict.fromkeys(("stop", "kill", "scancel"), "`orchestra cancel RUN` stops a run with a checkpoint"),
    **dict.fromkeys(("restart", "continue", "requeue"), "`orchestra resume RUN` goes on with a run"),
    **dict.fromkeys(("tail", "log"), "`orchestra logs RUN -f` follows a run"),
    **dict.fromkeys(("htop", "live", "dashboard", "tui"), "`orchestra top` shows runs live"),
    **dict.fromkeys(("trace", "perf"), "`orchestra profile RUN` traces the next steps of a run"),
    **dict.fromkeys(("alert", "alerts", "monitor"), "`orchestra watch RUN` says when something is wrong"),
    **dict.fromkeys(("explain", "debug", "diagnose"), "`orchestra why RUN` tells what ended a run"),
    **dict.fromkeys(("keys", "cfg", "presets"), "`orchestra config` explains keys and presets"),
    **dict.fromkeys(
        ("test", "check"), "`orchestra doctor` checks the machine, `orchestra rehearse RUN` a run"
    ),
    **dict.fromkeys(("evaluate", "validate"), "`orchestra eval RUN` measures a checkpoint's held-out loss"),
    **dict.fromkeys(("sample", "chat", "infer"), "`orchestra generate RUN TEXT` samples from a checkpoint"),
    "export": "`orchestra checkpoint export RUN` writes a model for Hugging Face",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit, and never guesses abbreviations."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def format_help(self) -> str:
        self.description, self.epilog = _paragraphs(self.description), _paragraphs(self.epilog)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hints = filter(None, map(self._meant, unknown))
        raise ConfigError("; ".join([message, *hints, f"see `{self.prog} --help`"]))

    def _meant(self, word: str) -> str | None:
        """Return what an option that does not exist may have meant: one of this verb, or a key."""
        import difflib

        option, _, value = word.partition("=")
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        is_key = option.startswith("--") or "." in option
        if is_key and takes_keys and (key := _key_meant(option.lstrip("-"), value)) is not None:
            return key
        if takes_keys and (letter := _letter_meant(word)) is not None:
            return letter
        shown = [
            name
            for action in self._actions
            for name in action.option_strings
            if action.help != argparse.SUPPRESS
        ]
        near = difflib.get_close_matches(option, shown, n=1, cutoff=0.75)
        return f"did you mean {near[0]}?" if near else None


def _letter_meant(word: str) -> str | None:
    """Return the key of an option that sbatch has: -N, -N4."""
    from orchestra.config.other_tools import key_of_letter

    key = key_of_letter(word)
    return None if key is None else f"write {key}={word[2:].lstrip('=') or 'VALUE'}"


def _key_meant(option: str, value: str) -> str | None:
    """Return what to write for an option that is a key here, or in another tool; None where it is none."""
    from orchestra.config.keys import find_key, nearest_keys
    from orchestra.config.other_tools import key_of, says_the_same

    name = option.replace("-", "_")
    same = (key for key in nearest_keys(name) if key.rpartition(".")[2] == name.rpartition(".")[2])
    key = name if find_key(name) is not None else key_of(name) or next(same, None)
    if key is None or "=" in key:
        return key and f"write {key}"
    return f"write {key}={value if value and says_the_same(name) else 'VALUE'}"


# What pathlib says of ~NAME.
_NO_HOME = "Could not determine home directory."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `orchestra ARGV…` and return its exit code (see orchestra.errors)."""
    _make_streams_safe()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with closed_to_others():
            code = _dispatch(words)
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
    except RuntimeError as error:
        if str(error) != _NO_HOME:
            raise
        named = " ".join(word for word in words if "~" in word) or "a path"
        _complain([f"{named}: nobody here has the name after ~, or no home folder; write the path out"])
        return EXIT_USAGE
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


# A password in an address: scheme://NAME:PASSWORD@host.
_PASSWORD = re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+(?=@)")


def _complain(problems: Sequence[str]) -> None:
    with contextlib.suppress(OSError):
        for problem in (_PASSWORD.sub(r"\1…", each) for each in problems):
            print(_ERROR + problem.replace("\n", "\n" + " " * len(_ERROR)), file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(_help())
        return EXIT_DONE if argv else EXIT_USAGE
    if argv[0] == "help":
        return _dispatch([*argv[1:], "--help"])
    if argv[1:] in (["-h"], ["--help"]) and (verbs := _verbs_of(argv[0])) and argv[0] not in VERBS:
        print(_help(argv[0], verbs))
        return EXIT_DONE
    if argv[0] in ("-V", "--version", "version"):
        print(f"orchestra {__version__}")
        return EXIT_DONE
    if argv[0] == _COMPLETE:
        completion = importlib.import_module(module_of("completion"))
        found = completion.candidates(" ".join(argv[1:]), VERBS, lambda verb: _parser(verb)[0])
        print("".join(f"{word}\n" for word in found), end="")
        return EXIT_DONE
    verb, rest = _find(argv)
    parser, module = _parser(verb)
    try:
        # Options and positional arguments in any order.
        arguments = parser.parse_intermixed_args(rest)
    except SystemExit:
        # Only --help ends the parser: errors are ConfigErrors.
        return EXIT_DONE
    return int(module.run(arguments))


def _parser(verb: str) -> tuple[Parser, ModuleType]:
    """Return the parser of a verb, and its module."""
    module = importlib.import_module(module_of(verb))
    parser = Parser(f"orchestra {verb}", VERBS[verb][0].upper() + VERBS[verb][1:] + ".")
    module.add_arguments(parser)
    return parser, module


def _paragraphs(text: str | None) -> str:
    """Return paragraphs no wider than a terminal; indented lines are to be typed, and stay as they are."""
    from orchestra.cli.text.figures import wrapped

    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*(text or "").splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += [*wrapped(" ".join(paragraph)), line]
        paragraph = []
    return "\n".join(lines).rstrip()


def module_of(verb: str) -> str:
    """Return the name of the module of a verb."""
    first = verb.split()[0]
    shared = f"{first}." if sum(each.startswith(f"{first} ") for each in VERBS) > 1 else ""
    folder = _FOLDERS.get(verb, shared)
    return f"orchestra.cli.{folder}{verb.replace(' ', '_')}_command"


def _find(argv: list[str]) -> tuple[str, list[str]]:
    for verb in VERBS:
        words = verb.split()
        if argv[: len(words)] == words:
            return verb, argv[len(words) :]
    import difflib

    if argv[0].startswith("-"):
        raise ConfigError(f"orchestra takes a verb first, found {argv[0]}; see `orchestra --help`")
    longer = " or ".join(f"`orchestra {verb}`" for verb in _verbs_of(argv[0]))
    if longer:
        raise ConfigError(f"orchestra {' '.join(argv[:2])}: expected {longer}")
    if argv[0] in INSTEAD:
        raise ConfigError(f"orchestra has no verb {argv[0]!r}; {INSTEAD[argv[0]]}")
    near = difflib.get_close_matches(argv[0], VERBS, n=1, cutoff=0.5)
    advice = f"did you mean `orchestra {near[0]}`?" if near else f"the verbs are {', '.join(VERBS)}"
    raise ConfigError(f"orchestra has no verb {argv[0]!r}; {advice}")


def _verbs_of(word: str) -> dict[str, str]:
    """Return the verbs that begin with a word, and what each does."""
    return {verb: summary for verb, summary in VERBS.items() if verb.split()[0] == word}


def _help(first: str = "VERB", listed: Mapping[str, str] = VERBS) -> str:
    width = max(map(len, listed))
    verbs = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in listed.items())
    return (
        f"usage: orchestra {first} [arguments]\n\n"
        "Trains language models; every verb explains itself with --help.\n\n"
        f"{verbs}\n\n"
        "A RUN is the name of a run, the unique start of one, or a path.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong configuration or usage (nothing was\n"
        "started), 75 stopped on request, to be continued, 93 starting again would not\n"
        "help, 130 interrupted."
    )
