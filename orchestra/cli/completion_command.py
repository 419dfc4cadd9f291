"""`orchestra completion SHELL`: a script that lets bash, zsh or fish complete what is typed.

The script asks the hidden verb `__complete LINE` for each word: verbs, options, groups, presets, keys, their
values, names of runs. It loads the module of a verb only where options are asked for.
"""

from __future__ import annotations

import contextlib
import shlex
import types
import typing
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from orchestra.cli.text.resolve import all_targets, elsewhere
from orchestra.config.descriptions import described_presets, group_names
from orchestra.config.home import read_home, run_folder
from orchestra.config.keys import known_keys
from orchestra.errors import EXIT_DONE, OrchestraError

_EXPLAINED = """\
  orchestra completion bash \\
    > ~/.local/share/bash-completion/completions/orchestra
  orchestra completion zsh > "${fpath[1]}/_orchestra"
  orchestra completion fish > ~/.config/fish/completions/orchestra.fish

or for one shell: source <(orchestra completion bash)
"""

# In bash a word ends at = and :, so that only what stands after them is replaced.
_BASH = """\
_orchestra_complete() {
    local line=${COMP_LINE:0:COMP_POINT} word ended
    word=${line##* }
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]}" __complete "$line" 2>/dev/null)
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        ended=${word%"${word##*=}"}
        COMPREPLY=("${COMPREPLY[@]#"$ended"}")
    fi
}
complete -o bashdefault -o default -F _orchestra_complete orchestra
"""
_ZSH = """\
#compdef orchestra
_orchestra() {
    local -a found open
    found=(${(f)"$(${words[1]} __complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    open=(${(M)found:#*[=.]})
    found=(${found:#*[=.]})
    (( $#open )) && compadd -S '' -a open
    (( $#found )) && compadd -a found
    (( $#open + $#found )) || _files
}
if [[ $funcstack[1] == _orchestra ]]; then _orchestra "$@"; else compdef _orchestra orchestra; fi
"""
_FISH = """\
complete -c orchestra -f -a '(orchestra __complete (commandline -cp) 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
# What the words behind a verb are.
_OF_OVERRIDES = ("run", "submit", "plan", "bench network", "doctor")
_OF_RUNS = ("status", "cancel", "report", "watch")
_OF_ONE_RUN = (
    *("why", "logs", "top", "profile", "eval", "generate"),
    *("checkpoint ls", "checkpoint verify", "checkpoint export"),
)
_RUN_THEN_OVERRIDES = ("resume", "rehearse")
# Options of any verb whose value is a run.
_RUN_OPTIONS = ("--after", "--like", "--scan", "--calibrate")


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = f"orchestra completion {'|'.join(SCRIPTS)}"
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=", ".join(SCRIPTS))
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the script and return 0."""
    print(SCRIPTS[arguments.shell], end="")
    return EXIT_DONE


def candidates(line: str, verbs: Mapping[str, str], options: Callable[[str], ArgumentParser]) -> list[str]:
    """Return what the last word of a command line may become. `options` gives the parser of a verb."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    last = "" if not words or line[-1:].isspace() else words.pop()
    typed = words[1:]
    verb = next((verb for verb in verbs if typed[: len(verb.split())] == verb.split()), None)
    if verb is None:
        begun = " ".join([*typed, ""])
        found: Iterable[str] = (each[len(begun) :].split()[0] for each in verbs if each.startswith(begun))
    elif last.startswith("-"):
        actions = [action for action in options(verb)._actions if action.help != SUPPRESS]
        found = (option for action in actions for option in action.option_strings if option.startswith("--"))
    else:
        rest = [word for word in typed[len(verb.split()) :] if not word.startswith("-")]
        found = _runs() if typed[-1] in _RUN_OPTIONS else _arguments(verb, rest, last)
    return sorted({each for each in found if each.startswith(last)})


def _arguments(verb: str, before: list[str], last: str) -> Iterator[str]:
    if verb in _OF_RUNS or (verb in (*_OF_ONE_RUN, *_RUN_THEN_OVERRIDES) and not before):
        yield from _runs()
    elif verb in (*_OF_OVERRIDES, *_RUN_THEN_OVERRIDES):
        yield from _values(last) if "=" in last else _keys(last)
    elif verb == "config":
        yield from (key.removesuffix("=") for key in _keys(last))
    elif verb == "completion":
        yield from SCRIPTS


def _runs() -> Iterator[str]:
    """Yield the names of runs and sweeps."""
    with contextlib.suppress(OrchestraError, OSError):
        folder = run_folder()
        yield from (target.name for target in (all_targets(folder) or elsewhere(folder)))


def _keys(last: str) -> Iterator[str]:
    """Yield the keys one section deeper than what is typed: sections end in a dot, groups and keys in =."""
    if "." not in last:
        yield from (f"{group}=" for group in group_names() if described_presets(group, _folders()))
    depth = last.count(".")
    for key in known_keys().values():
        if key.name.count(".") == depth:
            yield f"{key.name}." if key.is_section else f"{key.name}="


def _values(last: str) -> Iterator[str]:
    """Yield KEY=VALUE for a group's presets, and for a key whose values are few."""
    name = last.partition("=")[0]
    if name in group_names():
        yield from (f"{name}={preset}" for preset in described_presets(name, _folders()))
    elif name in known_keys():
        yield from (f"{name}={value}" for value in _choices(known_keys()[name].type))


def _choices(hint: Any) -> Iterator[str]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if is_union else (hint,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            yield from (member.name for member in kind)
        elif kind is bool:
            yield from ("true", "false")
        elif kind is type(None):
            yield "null"
        elif kind is str and len(kinds) > 1 and {bool, int} & {*kinds}:
            yield "auto"


def _folders() -> list[Path]:
    with contextlib.suppress(OrchestraError):
        return [Path(folder) for folder in read_home().searchpath]
    return []
