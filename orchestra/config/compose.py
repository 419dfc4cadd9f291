"""Composes a configuration from presets and overrides, types it, checks every rule, and reports all problems.

`compose` makes the configuration of a new run, `changed_config` puts overrides on top of a frozen one, for a
run that goes on; the result passes the same rules. Hydra's compose API does the composing; none of its
exceptions leaves this module.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from conf.schema import CheckpointConfig, Config, LauncherName, ModelConfig, Source
from orchestra.config.home import chooses_cluster
from orchestra.config.keys import misplaced_elements, shown
from orchestra.config.machine import Situation, resolved, this_machine, tokens_per_step
from orchestra.config.overrides import SEARCH_PATH, Checked, check_overrides
from orchestra.config.plugin_facts import plugin_facts
from orchestra.config.preset_files import (
    GROUPS,
    Tree,
    file_problems,
    header_problems,
    own_folder,
    unquoted_times,
)
from orchestra.config.rules.all_rules import problems_of
from orchestra.data.token_files import local_prefix, read_index, token_file_prefix
from orchestra.errors import ConfigError, DataError
from orchestra.plugins import is_plugin
from orchestra.run.config_file import to_yaml, writable_schema
from orchestra.run.planned_faults import spelled

_MAIN = "train"
_HELD_OUT = "eval.data"
# A vocabulary's size is padded to it: matrices of other sizes are slow, and tensor parallelism cuts them.
_VOCABULARY_MULTIPLE = 16
# What OmegaConf says of ${HOME}.
_VARIABLE = re.compile(r"Interpolation key '([A-Z][A-Z0-9_]*)' not found")
# What goes wrong where Hydra or YAML cannot use what somebody wrote.
_UNUSABLE = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError)


@dataclass(frozen=True)
class Composed:
    """A configuration, resolved and checked, and what it was made from."""

    config: Config
    # All of them, as `orchestra run` would take them; of a member of a sweep those that were swept, too.
    overrides: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    # The preset of each group, as in {"model": "debug"}; not of the members of a sweep.
    presets: dict[str, str] = field(default_factory=dict)


def compose(overrides: Sequence[str], situation: Situation | None = None) -> Composed:
    """Compose, type, resolve and check a configuration for a situation (`orchestra run` here by default).

    Device and ranks per node are put in the place of `auto` where this machine is the one that trains. Raises
    ConfigError with every problem found: unreadable and unknown overrides, wrong types, then broken rules.
    """
    checked = check_overrides(overrides)
    try:
        values, presets = merge(checked)
        config, broken = settled(
            with_vocabulary(typed(values), checked.keys), checked, situation or this_machine()
        )
    except ConfigError as error:
        raise _refusal([*checked.problems, *error.problems]) from error
    if problems := [*checked.problems, *broken]:
        raise _refusal(problems)
    return Composed(config, tuple(overrides), presets=presets)


def _refusal(problems: Sequence[str]) -> ConfigError:
    """Return the error with each problem once."""
    return ConfigError(list(dict.fromkeys(problems)))


def settled(config: Config, checked: Checked, situation: Situation) -> tuple[Config, list[str]]:
    """Return a typed configuration resolved for a situation, and a sentence for each rule that it breaks."""
    problems = said_twice(config, checked.keys)
    open_config = last_said(config, checked.keys)
    config = resolved(open_config, situation)
    if not checked.lacks_preset:
        broken = [
            problem for problem in problems_of(config, situation) if not is_about(problem, checked.refused)
        ]
        problems += _with_binary(broken, open_config, checked, situation)
    return config, problems


def is_about(problem: str, keys: Iterable[str]) -> bool:
    """Whether a rule's sentence names one of `keys`."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", problem) for key in keys if key)


def _with_binary(
    problems: Sequence[str], config: Config, checked: Checked, situation: Situation
) -> Iterator[str]:
    """Yield the sentences; where a number was written as 4M and 4Mi breaks no rule, with that as advice."""
    for problem in problems:
        fitting = [
            f"{key}={written}"
            for key, written in checked.binary.items()
            if is_about(problem, (key,)) and not _breaks_rules(config, key, written, situation)
        ]
        yield f"{problem}, or {fitting[0]}" if fitting else problem


def _breaks_rules(config: Config, key: str, written: str, situation: Situation) -> bool:
    """Whether a rule's sentence names `key` where it has the value that is written."""
    node = cast(DictConfig, OmegaConf.merge(writable_schema(), OmegaConf.create(to_yaml(config))))
    put(node, OverridesParser.create().parse_overrides(check_overrides([f"{key}={written}"]).accepted))
    return any(
        is_about(problem, (key,)) for problem in problems_of(resolved(typed(node), situation), situation)
    )


def merge(checked: Checked) -> tuple[Any, dict[str, str]]:
    """Let Hydra merge the presets onto the schema, and put the accepted overrides on top; return the values,
    and the preset of each group.
    """
    first, later = _in_turn(checked)
    try:
        # Our own presets do not change, and are composed once.
        composed = _composed if checked.tree.folders[1:] else _composed_once
        values, presets = copy.deepcopy(composed(first))
    except RecursionError as error:
        names = ", ".join(f"{group}={preset}" for group, preset in checked.presets.items())
        raise ConfigError(f"the defaults of {names}: a preset leads back to itself in them") from error
    except _UNUSABLE as error:
        raise ConfigError(_tree_problems(checked) or [in_one_line(error)]) from error
    files = (checked.tree.file(f"{group}/{preset}") for group, preset in presets.items())
    if problems := [problem for file in files if file is not None for problem in unquoted_times(file)]:
        raise ConfigError(problems)
    put(values, OverridesParser.create().parse_overrides(later))
    model = presets.get("model")
    if model is not None and "model.name" not in checked.keys and _inherits_name(checked.tree, model, values):
        values.model.name = model.rpartition("/")[2]
    return values, presets


def _in_turn(checked: Checked) -> tuple[tuple[str, ...], list[str]]:
    """Return the overrides that Hydra carries out, and those that are put on top of what it composed: values.
    Where some add or delete a key, held-out sources alone, whose section a preset may have made null.
    """
    of_presets = (*checked.presets, SEARCH_PATH)
    values = [text for text in checked.accepted if _name(text) not in of_presets]
    held_out = [text for text in values if f"{_name(text)}.".startswith(f"{_HELD_OUT}.")]
    others = [text for text in values if text not in held_out]
    later = held_out if any(text.startswith(("+", "~")) for text in others) else values
    return tuple(text for text in checked.accepted if text not in later), later


def _composed(overrides: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """Let Hydra compose; return the values, and the preset of each group."""
    ConfigStore.instance().store(name="schema", node=writable_schema())
    with hydra.initialize_config_dir(str(own_folder()), job_name="orchestra", version_base="1.3"):
        whole = hydra.compose(_MAIN, list(overrides), return_hydra_config=True)
    choices = OmegaConf.to_container(whole.hydra.runtime.choices)
    assert isinstance(choices, dict)
    OmegaConf.set_struct(whole, False)
    del whole["hydra"]
    return whole, {group: str(choices[group]) for group in GROUPS if choices.get(group) is not None}


@functools.lru_cache(maxsize=64)
def _composed_once(overrides: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    return _composed(overrides)


def chosen_launcher(overrides: Sequence[str]) -> LauncherName | None:
    """Return what starts the ranks where overrides choose a cluster, whatever its preset is called.

    None where they choose none, and where what they choose is wrong: the check of the whole tells.
    """
    if not any(map(chooses_cluster, overrides)):
        return None
    checked = check_overrides(
        [text for text in overrides if chooses_cluster(text) or _name(text) == SEARCH_PATH]
    )
    try:
        return None if checked.problems else typed(merge(checked)[0]).cluster.launcher
    except ConfigError:
        return None


def _inherits_name(tree: Tree, preset: str, values: Any) -> bool:
    """Whether a model's preset has a name that is another one's, since its own file says none."""
    file = tree.file(f"model/{preset}")
    says_name = file is None or "name" in OmegaConf.load(file)
    return not says_name and values.model.name in tree.options("model")


def typed(values: Any) -> Config:
    """Turn merged values into the typed configuration. Raises ConfigError naming the key that has none."""
    try:
        config = cast(Config, OmegaConf.to_object(values))
    except MissingMandatoryValue as error:
        missing = sorted(OmegaConf.missing_keys(values))
        raise ConfigError([f"{name}: no value given (???); set {name}=…" for name in missing]) from error
    except OmegaConfBaseException as error:
        raise unfit(error) from error
    if problems := list(misplaced_elements(config)):
        raise ConfigError(problems)
    faults = spelled(config.recovery.inject)
    return replace(config, recovery=replace(config.recovery, inject=faults))


def unfit(error: OmegaConfBaseException) -> ConfigError:
    """Return the error for a value that does not fit its key."""
    reason = str(error.msg or error).splitlines()[0]
    if variable := _VARIABLE.fullmatch(reason):
        # A line for a shell, such as one of cluster.setup.
        name = variable[1]
        reason += f"; a variable of the shell is written ${name} or \\${{{name}}}"
    return ConfigError(f"{error.full_key or 'a value'}: {reason}")


def put(values: Any, accepted: Iterable[Override]) -> None:
    """Set the values of accepted overrides in composed ones, in their order, as Hydra does.

    Raises ConfigError for one that does not fit its key.
    """
    try:
        for override in accepted:
            name = override.key_or_group
            is_section = isinstance(override.value(), dict) and name == _HELD_OUT
            if values.eval.data is None and (is_section or name.startswith(f"{_HELD_OUT}.")):
                # OmegaConf sets nothing in a section that is null.
                values.eval.data = {}
            if override.is_delete():
                above, _, last = name.rpartition(".")
                section = OmegaConf.select(values, above)
                if section is None:
                    raise ConfigError(f"~{name}: there is no {above} to delete it from; leave it out")
                section.pop(last, None)
            else:
                OmegaConf.update(values, name, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise unfit(error) from error


def _tree_problems(checked: Checked) -> list[str]:
    """Return what is wrong inside the YAML files that the overrides choose, each sentence naming its file.

    First their headers, since Hydra finds no further file after a wrong one, then every value.
    """
    problems: list[str] = []
    try:
        for group, preset in checked.presets.items():
            file = checked.tree.file(f"{group}/{preset}")
            problems += [] if file is None else header_problems(file, group, checked.tree)
        if problems:
            return problems
        with hydra.initialize_config_dir(str(own_folder()), job_name="orchestra", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(_MAIN, checked.accepted, RunMode.RUN).defaults
        for default in defaults:
            file = checked.tree.file(default.config_path or "")
            problems += [] if file is None else file_problems(file, default.package or "")
    except _UNUSABLE as error:
        problems.append(in_one_line(error))
    return problems


def with_vocabulary(config: Config, keys: set[str]) -> Config:
    """Return the configuration of a new run with the vocabulary of its data, where none was given.

    As by default it is padded to a multiple of 16. Remote files are not read here; of what cannot be read a
    rule tells.
    """
    model, data = config.model, config.data
    is_given = "model.vocab_size" in keys or model.vocab_size != ModelConfig.vocab_size
    if is_given or model.init_from is not None or data.source == Source.stdlib:
        return config
    if is_plugin(data.source):
        size = plugin_facts(config).vocabularies.get("data.source")
        return config if size is None else _with_vocabulary_of(config, size)
    paths = filter(None, (data.path, *(part.path for part in data.blend)))
    sizes = []
    for prefix in filter(None, (local_prefix(token_file_prefix(path)) for path in paths)):
        with contextlib.suppress(DataError):
            sizes.append(read_index(Path(f"{prefix}.json")).vocab_size)
    return _with_vocabulary_of(config, max(sizes)) if sizes else config


def _with_vocabulary_of(config: Config, size: int) -> Config:
    padded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return replace(config, model=replace(config.model, vocab_size=padded))


# Of each pair one key counts: the first is what the second, where it is given, takes the place of.
_ONE_OF = (
    ("train.global_batch_size", "train.global_batch_tokens"),
    ("train.global_batch_size", "train.batch_ramp"),
    ("train.global_batch_tokens", "train.batch_ramp"),
    ("train.steps", "train.tokens"),
    ("checkpoint.every_steps", "checkpoint.every_s"),
)


def last_said(config: Config, keys: set[str]) -> Config:
    """Keep one of each pair: an override's, else the second where there is one. Steps are counted from tokens
    later, and a number of steps between saves that does not count stays what it is.
    """
    for first, second in _ONE_OF:
        if first in keys and second not in keys and attrgetter(first)(config) is not None:
            section, name = second.split(".")
            nothing: list[Any] | None = [] if isinstance(attrgetter(second)(config), list) else None
            without: dict[str, Any] = {section: replace(getattr(config, section), **{name: nothing})}
            config = replace(config, **without)
    train, checkpoint = config.train, config.checkpoint
    if train.global_batch_tokens is not None:
        train = replace(train, global_batch_size=None)
    if checkpoint.every_s is not None and checkpoint.every_steps is None:
        # Null saves nothing at all.
        checkpoint = replace(checkpoint, every_steps=CheckpointConfig.every_steps)
    return replace(config, train=train, checkpoint=checkpoint)


def said_twice(config: Config, keys: set[str]) -> list[str]:
    """Return a sentence for each pair of which both keys are given."""
    return [
        f"{first} and {second} are both given; give one of them"
        for first, second in _ONE_OF
        if {first, second} <= keys
        and all(attrgetter(key)(config) not in (None, []) for key in (first, second))
    ]


def in_one_line(error: Exception) -> str:
    """Return Hydra's message without the folders it looked in."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: cannot be read: {error.strerror}"
    lines = (line.strip() for line in str(error).partition("Config search path:")[0].splitlines())
    return "; ".join(line for line in lines if line) or type(error).__name__


_MODEL = "the checkpoints hold this model and no other"
_ORDER = "which samples come next follows from it, and some would come twice or never"
_WIDTHS = "its initial values and learning rates follow from it"
_PLACE = "its records and checkpoints lie there"
# Keys that a run keeps for its whole life, and why.
FIXED = {
    **{f"model.{field.name}": _MODEL for field in dataclasses.fields(Config().model)},
    "train.seed": _ORDER,
    "train.seq_len": _ORDER,
    "data.source": _ORDER,
    "data.source_identity": _ORDER,
    "data.path": f"{_ORDER}; where the same files were moved, leave a link behind",
    "data.blend": _ORDER,
    "optim.state_dtype": "the checkpoints hold its moments in this type, and they are not converted",
    "optim.parametrization": _WIDTHS,
    **{f"optim.mup.{field.name}": _WIDTHS for field in dataclasses.fields(Config().optim.mup)},
    "optim.target": "the checkpoints hold its state and no other's",
    "run.name": _PLACE,
    "run.dir": _PLACE,
    "run.group": "its files were given to it",
}


def changed_config(
    frozen: Config, overrides: Sequence[str], situation: Situation, fixed: Mapping[str, str] = FIXED
) -> Config:
    """Return a frozen configuration with overrides on top, resolved and checked for `situation`.

    GROUP=NAME replaces that whole section by the preset. `fixed`: keys that may not change, and why; none for
    a new run that is made after another one. Raises ConfigError with every problem found: unreadable and
    unknown overrides, wrong types, keys that are fixed for the run's life, broken rules.
    """
    checked = check_overrides(overrides)
    problems = list(checked.problems)
    if (name := checked.presets.get("experiment")) is not None:
        problems.append(f"experiment={name} describes a new run; change single keys of this one")
    try:
        config, broken = settled(_applied(frozen, checked), checked, situation)
    except ConfigError as error:
        raise _refusal([*problems, *error.problems]) from error
    problems += [*_fixed_problems(frozen, config, fixed), *_tokens_problems(frozen, config), *broken]
    if problems:
        raise _refusal(problems)
    return config


def _tokens_problems(before: Config, after: Config) -> Iterator[str]:
    """Steps that were trained took the tokens of their own batch: how many are left is not known here."""
    old, new = tokens_per_step(before), tokens_per_step(after)
    has_ramp = before.train.batch_ramp or after.train.batch_ramp
    if after.train.tokens is not None and old != new and not has_ramp:
        yield (
            f"train.tokens={after.train.tokens}: the steps trained so far had {old} tokens each and the next "
            f"ones have {new}; give train.steps, the number of the last one"
        )


# As many keys of one reason are told with their values: a preset of another model changes a dozen.
_FEW = 3


def _fixed_problems(before: Config, after: Config, fixed: Mapping[str, str]) -> Iterator[str]:
    differing: dict[str, list[str]] = {}
    for name, reason in fixed.items():
        if attrgetter(name)(before) != attrgetter(name)(after):
            differing.setdefault(reason, []).append(name)
    verb = "submit" if before.cluster.launcher is LauncherName.slurm else "run"
    for reason, names in differing.items():
        end = f"since {reason}; start a new run with `orchestra {verb}` instead"
        if len(names) > _FEW:
            yield f"{', '.join(names)}: the run has other values and keeps them, {end}"
            continue
        for name in names:
            old, new = _shown(attrgetter(name)(before)), _shown(attrgetter(name)(after))
            yield f"{name}={new}: the run has {name}={old} and keeps it, {end}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return shown([dataclasses.asdict(part) for part in value])
    return shown(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value)  # type: ignore[arg-type]


def _applied(frozen: Config, checked: Checked) -> Config:
    """Put presets and values on top of the frozen values. Raises ConfigError for what does not fit a key."""
    node = cast(DictConfig, OmegaConf.merge(writable_schema(), OmegaConf.create(to_yaml(frozen))))
    of_presets = (*checked.presets, SEARCH_PATH)
    if checked.presets:
        groups = [text for text in checked.accepted if _name(text) in of_presets]
        composed, _ = merge(check_overrides(groups))
        for group in checked.presets:
            if group != "experiment":
                node[group] = composed[group]
    values = [text for text in checked.accepted if _name(text) not in of_presets]
    put(node, OverridesParser.create().parse_overrides(values))
    return typed(node)


def _name(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")
