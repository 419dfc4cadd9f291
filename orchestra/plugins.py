"""Plug-ins: code that a configuration names as `package.module:name`, with options that it is called with.

`named_in` lists those of a configuration, `load` imports one, `option_problems` compares its options with its
signature, and `loaded` gives it them. Called by the ranks, and by the process that looks at plug-ins before
anything starts (`orchestra.train.check_plugins`): the commands themselves import no plug-in.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from conf.schema import Config, DataConfig
from orchestra.errors import ConfigError

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# What the answer of `orchestra.train.check_plugins` begins with among all that its process prints.
ANSWER = "plug-ins of orchestra: "
# Similarity below which a suggestion would rather mislead (difflib's ratio).
_LIKENESS = 0.6


@dataclass(frozen=True)
class Plugin:
    """A plug-in as the configuration names it: the key, `module:name`, the options and their key; and what
    it is called with: so many arguments by position, then some by name.
    """

    key: str
    target: str
    options: Mapping[str, Any]
    options_key: str
    num_positional: int
    named: tuple[str, ...] = ()
    # What is given by name where it is asked for.
    offered: tuple[str, ...] = ()


def named_in(config: Config) -> list[Plugin]:
    """Return the plug-ins of a configuration."""
    found = []
    if config.model.block is not None:
        options = config.model.block_options
        offered = ("layer_number",)
        found.append(
            Plugin("model.block", config.model.block, options, "model.block_options", 1, (), offered)
        )
    if config.optim.target is not None:
        options = config.optim.options
        found.append(Plugin("optim.target", config.optim.target, options, "optim.options", 1, ("lr",)))
    train = config.train
    if train.loss is not None:
        found.append(Plugin("train.loss", train.loss, train.loss_options, "train.loss_options", 2))
    for target in train.callbacks:
        name = target.rpartition(":")[2]
        options = train.callbacks_options.get(name, {})
        # A rule tells of what are no options.
        options = options if isinstance(options, dict) else {}
        found.append(Plugin("train.callbacks", target, options, f"train.callbacks_options.{name}", 0))
    return [*found, *_sources(config)]


def source_plugin(target: str, options: Mapping[str, Any], section: str) -> Plugin:
    """Return a source of data as a plug-in; `section` of the configuration names it."""
    return Plugin(f"{section}.source", target, options, f"{section}.source_options", 0, ("seq_len",))


def is_plugin(source: str) -> bool:
    """Whether a source of data is meant to be a plug-in."""
    return ":" in source


def _sources(config: Config) -> Iterator[Plugin]:
    """Yield the sources of data that are plug-ins; a rule tells of what is written otherwise in eval.data."""
    if is_plugin(config.data.source):
        yield source_plugin(config.data.source, config.data.source_options, "data")
    held_out: Mapping[str, Any] = config.eval.data or {}
    named = {"": held_out} if "source" in held_out else {f".{name}": each for name, each in held_out.items()}
    for name, entry in named.items():
        source = entry.get("source") if isinstance(entry, Mapping) else None
        options = entry.get("source_options", {}) if isinstance(entry, Mapping) else {}
        if isinstance(source, str) and is_plugin(source) and isinstance(options, Mapping):
            yield source_plugin(source, options, f"eval.data{name}")


def spelling_problem(plugin: Plugin) -> str | None:
    """Return what is wrong with how a target is written; None: nothing."""
    if _TARGET.fullmatch(plugin.target):
        return None
    return f"{plugin.key}={plugin.target!r} names no plug-in; write package.module:name"


@dataclass(frozen=True)
class PluginSource:
    """Where the top-level module of a plug-in lies: a file or a package's folder that nobody installed, or a
    distribution with its version.
    """

    module: str
    place: Path | None
    version: str | None = None


def sources_of(config: Config) -> list[PluginSource]:
    """Return where the plug-ins of a configuration lie, as ranks would find them; nothing is imported. Those
    that are orchestra's or Python's own are left out, and of a package in two folders the first one counts.
    """
    tops = dict.fromkeys(plugin.target.partition(":")[0].partition(".")[0] for plugin in named_in(config))
    path = [folder for folder in (*_search_path(), *sys.path) if folder]
    found = []
    for top in tops:
        if top == __name__.partition(".")[0] or top in sys.stdlib_module_names:
            continue
        spec = PathFinder.find_spec(top, path)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if spec is None or not (folders or spec.origin):
            continue
        place = Path(folders[0] if folders else str(spec.origin))
        if {"site-packages", "dist-packages"} & set(place.parts):
            names = importlib.metadata.packages_distributions().get(top, [])
            version = f"{names[0]} {importlib.metadata.version(names[0])}" if names else "unknown"
            found.append(PluginSource(top, None, version))
        else:
            found.append(PluginSource(top, place))
    return found


def _search_path() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


def load(plugin: Plugin) -> Callable[..., Any]:
    """Import what a plug-in names. Raises ConfigError where there is no such thing, or it cannot be called.

    Whatever the module raises while it is imported becomes a ConfigError too.
    """
    if problem := spelling_problem(plugin):
        raise ConfigError(problem)
    module_name, _, name = plugin.target.partition(":")
    said = f"{plugin.key}={plugin.target}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{said}: importing {module_name} failed: {error}") from error
        raise ConfigError(
            f"{said}: there is no module {error.name}; ranks find what is installed and what PYTHONPATH "
            "names: install the package, or export PYTHONPATH=<its folder>"
        ) from error
    except Exception as error:
        raise ConfigError(f"{said}: importing {module_name} failed: {one_line(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{said}: {module_name} has no {name}{_meant(name, dir(module))}")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(
            f"{said} is a {type(found).__name__} and cannot be called; name a function or class"
        )
    return found  # type: ignore[no-any-return]


def option_problems(plugin: Plugin, called: Callable[..., Any]) -> Iterator[str]:
    """Yield a sentence for each option that the signature does not take, and for each that it lacks."""
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return  # of something built in; a call tells
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_place = [parameter.name for parameter in parameters if parameter.kind in positional]
    given = {*by_place[: plugin.num_positional], *plugin.named, *plugin.offered}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    left = {each.name: each for each in parameters if each.kind in by_name and each.name not in given}
    said = f"{plugin.target} takes {', '.join(left) or 'no options'}"
    for name in plugin.options:
        if name in given:
            yield f"{plugin.options_key}.{name}: orchestra gives this itself; leave it out"
        elif name not in left and not takes_any:
            yield f"{plugin.options_key}.{name}: no such option{_meant(name, left)}; {said}"
    for name, parameter in left.items():
        if parameter.default is parameter.empty and name not in plugin.options:
            yield f"{plugin.options_key}.{name} is missing: {plugin.target} needs it; set it"
    for name in plugin.named:
        if not takes_any and name not in [parameter.name for parameter in parameters]:
            yield f"{plugin.key}={plugin.target}: it is called with {name}= and takes none; add that argument"


def loaded(plugin: Plugin) -> Callable[..., Any]:
    """Return a plug-in with its options given. Raises ConfigError where it cannot be had."""
    called = load(plugin)
    if problems := list(option_problems(plugin, called)):
        raise ConfigError(problems)
    return functools.partial(called, **plugin.options)


def names_taken(called: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters of something that is called; none of something built in."""
    try:
        return set(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return set()


def other_source(data: DataConfig, identity: str) -> str:
    """Return the sentence for a source of data that has other ones than its run began with."""
    return (
        f"data.source={data.source} has {identity}, and the run began with {data.source_identity}: other "
        "samples would come next; bring those back, or begin a new run with data.source_identity=null"
    )


def no_separator(source: str) -> str:
    """Return the sentence for a source whose documents are to be masked, and which tells none apart."""
    return (
        f"data.document_masks=true goes by the token that ends each document, and data.source={source} names "
        "none; let what it returns have separator_id, where its documents end with that, or use "
        "data.document_masks=false"
    )


def one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    first = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first])


def _meant(name: str, options: Any) -> str:
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=_LIKENESS)
    return f"; did you mean {near[0]}?" if near else ""
