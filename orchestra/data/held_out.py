"""Which data a run is evaluated on: the sources of `eval.data` by name, from the configuration alone.

Called by the rules of a configuration, by the trainer and by `orchestra eval`. It opens no tokens and imports
no torch.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from typing import Any

from conf.schema import BlendPart, Config, DataConfig, Source
from orchestra.data.token_files import NAMES_OF_SOURCES, SOURCE_NAME, index_of
from orchestra.errors import ConfigError
from orchestra.plugins import is_plugin

# The name of a source that was given none.
HELD_OUT = "held_out"
_KEYS = ("source", "path", "blend", "cache_dir", "source_options")
_EXAMPLE = "eval.data={wiki:{path:PREFIX}}"


def evaluates(config: Config) -> bool:
    """Whether a run evaluates while it trains."""
    return config.eval.every_steps is not None or config.eval.at_start


def held_out_data(config: Config) -> dict[str, DataConfig]:
    """Return the data to evaluate on, by name and in the order given; what else `data` says holds for it too.

    Empty where there is none: token files without eval.data. Raises ConfigError with all that is wrong.
    """
    given = config.eval.data
    if not given:
        return {HELD_OUT: config.data} if config.data.source == Source.stdlib else {}
    sources = {HELD_OUT: given} if any(key in _KEYS for key in given) else given
    problems: list[str] = []
    found = {name: _data(name, entry, config.data, problems) for name, entry in sources.items()}
    if problems:
        raise ConfigError(problems)
    return found


def content_of(data: DataConfig) -> list[Any]:
    """Return what tells the tokens of a held-out source from others, as JSON: equal for the same files at
    another place, and other for other files at the same one. Of a plug-in only what it is told counts.

    Reads the indices of token files. Raises DataError where one cannot be read.
    """
    if data.source == Source.tokens:
        parts = data.blend or [BlendPart(str(data.path))]
        return [[dataclasses.asdict(index_of(part.path)), part.weight] for part in parts]
    # The library's files are those of the interpreter.
    own = platform.python_version() if data.source == Source.stdlib else data.source_options
    return [str(data.source), own]


def other_separator(name: str, separator_id: int, of_training: int, *, is_packed: bool = True) -> str:
    """Return what is wrong with a source whose documents end with another token than the training's, where
    the model tells them apart by that. `is_packed`: it is a token file.
    """
    advice = "pack it with the same --separator" if is_packed else "let them end with the same token"
    return (
        f"eval.data.{name}: token {separator_id} ends its documents and {of_training} those of the training, "
        f"by which data.document_masks=true tells them apart; {advice}, or use data.document_masks=false"
    )


def mapped_paths(given: Any, change: Callable[[str], str]) -> Any:
    """Return `eval.data` with each path in it changed; what is no path stays, right or wrong."""
    if isinstance(given, Mapping):
        return {
            key: change(value)
            if key in ("path", "cache_dir") and isinstance(value, str)
            else _inner(value, change)
            for key, value in given.items()
        }
    return given


def _inner(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [mapped_paths(each, change) for each in value]
    return mapped_paths(value, change)


def _data(name: Any, entry: Any, of_training: DataConfig, problems: list[str]) -> DataConfig:
    """Return one entry as a data section; what is wrong with it is added to `problems`."""
    key = f"eval.data.{name}"
    before = len(problems)
    if not SOURCE_NAME.fullmatch(str(name)):
        problems.append(f"{key}: {NAMES_OF_SOURCES}")
    if not isinstance(entry, Mapping):
        problems.append(f"{key}={entry}: expected a section of {', '.join(_KEYS)}, e.g. {_EXAMPLE}")
        return of_training
    problems += [
        f"{key}.{child}: no such key; a held-out source has {', '.join(_KEYS)}"
        for child in entry
        if child not in _KEYS
    ]
    path, cache_dir = entry.get("path"), entry.get("cache_dir", of_training.cache_dir)
    problems += [
        f"{key}.{child}={entry[child]}: expected a path"
        for child in ("path", "cache_dir")
        if child in entry and not (isinstance(entry[child], str) and entry[child].strip())
    ]
    blend = _blend(key, entry.get("blend") or [], problems)
    word = entry.get("source", Source.tokens.name if path or blend else None)
    is_plugged, options = isinstance(word, str) and is_plugin(word), entry.get("source_options") or {}
    if not is_plugged and not (isinstance(word, str) and word in Source.__members__):
        choices = f"{', '.join(Source.__members__)} or package.module:name"
        problems.append(f"{key}.source={word}: expected {choices}; e.g. {_EXAMPLE}")
    elif word != Source.tokens and (path or blend):
        problems.append(f"{key}: path and blend are for source=tokens; leave them out")
    elif not is_plugged and options:
        problems.append(f"{key}.source_options are for a plug-in, source=package.module:name; leave them out")
    elif not isinstance(options, Mapping):
        problems.append(f"{key}.source_options={options}: expected options by name, {{OPTION: VALUE}}")
    elif word == Source.tokens and bool(path) == bool(blend):
        problems.append(f"{key}: give either path=PREFIX, what `orchestra data pack` wrote, or blend")
    if len(problems) > before:
        return of_training
    return dataclasses.replace(
        of_training,
        source=str(word),
        source_options=dict(options),
        source_identity=None,
        path=path,
        blend=blend,
        cache_dir=cache_dir,
        ledger=False,
    )


def _blend(key: str, entries: Any, problems: list[str]) -> list[BlendPart]:
    parts = []
    for number, part in enumerate(entries if isinstance(entries, list) else [entries]):
        known = (
            isinstance(part, Mapping)
            and set(part) <= {"path", "weight"}
            and isinstance(part.get("path"), str)
        )
        weight = part.get("weight", 1.0) if known else None
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            problems.append(
                f"{key}.blend[{number}]={part}: expected {{path: PREFIX, weight: a number above 0}}"
            )
        else:
            parts.append(BlendPart(part["path"], float(weight)))
    return parts
