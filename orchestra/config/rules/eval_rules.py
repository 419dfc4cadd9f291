"""Rules about held-out data: what is evaluated, when, and what goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conf.schema import Config, DataConfig, Source
from orchestra.config.machine import Situation
from orchestra.config.plugin_facts import plugin_facts
from orchestra.config.rules.place_rules import problems_of_blend, problems_of_token_file
from orchestra.data.held_out import evaluates, held_out_data, other_separator
from orchestra.data.token_files import (
    BYTES_SEPARATOR,
    TokenIndex,
    local_prefix,
    read_index,
    token_file_prefix,
)
from orchestra.errors import ConfigError, DataError
from orchestra.plugins import is_plugin
from orchestra.run.metrics_file import is_eval_column

# The tokenizer of data.source=stdlib, as an index names it, and the separator.
_BYTES = ("bytes", "", BYTES_SEPARATOR)


def rule_eval_data(config: Config, _: Situation) -> Iterator[str]:
    """The sources must be there, and mean by a token what the training's data mean by it."""
    try:
        sources = held_out_data(config)
    except ConfigError as error:
        yield from error.problems
        return
    if not sources and evaluates(config):
        every = config.eval.every_steps
        asked = "eval.at_start=true" if every is None else f"eval.every_steps={every}"
        yield (
            f"{asked} needs data that training does not read, and data.source={config.data.source} names "
            "none; give eval.data={NAME:{path:PREFIX}}, with files of `orchestra data pack`"
        )
    if not config.eval.data:
        return
    training = _packed_with(config.data)
    for name, data in sources.items():
        for path in _paths(data):
            yield from problems_of_token_file(path, config, f"eval.data.{name}")
        yield from problems_of_blend(data.blend, f"eval.data.{name}.blend")
        held_out = _packed_with(data)
        if training is None or held_out is None:
            continue
        if held_out[:2] != training[:2]:
            yield (
                f"eval.data.{name} was packed with another tokenizer than the training's data; pack it "
                "with the same one"
            )
        elif config.data.document_masks and held_out[2] != training[2]:
            yield other_separator(name, held_out[2], training[2])


def rule_eval_documents(config: Config, situation: Situation) -> Iterator[str]:
    """The model tells documents apart by the training's separator, also where one of both is a plug-in: that
    it is evaluated on has to name the same one.
    """
    given, training = config.eval.data, _packed_with(config.data)
    if not config.data.document_masks or not given:
        return
    try:
        sources = held_out_data(config)
    except ConfigError:
        # Another rule tells.
        return
    facts = plugin_facts(config)
    ours = facts.separators.get("data.source") if training is None else training[2]
    for name, data in sources.items():
        key = "eval.data.source" if "source" in given else f"eval.data.{name}.source"
        is_plugged, packed = is_plugin(data.source), _packed_with(data)
        # Of packed files beside packed ones another rule tells.
        if (key not in facts.vocabularies) if is_plugged else (packed is None or training is not None):
            continue
        separator = facts.separators.get(key) if packed is None else packed[2]
        if separator is not None and ours is not None and separator != ours:
            yield other_separator(name, separator, ours, is_packed=not is_plugged)
        elif separator is None and not situation.from_step and situation.verb != "resume":
            # A run that goes on is evaluated as it was.
            its = "the training's" if ours is None else str(ours)
            yield (
                f"eval.data.{name}: data.document_masks=true goes by the token that ends each document of "
                f"the training, and {data.source} names none; let what it returns have separator_id={its}, "
                "where its documents end with that, or use data.document_masks=false"
            )


def rule_best_by_eval(config: Config, _: Situation) -> Iterator[str]:
    """Checkpoints are compared by held-out losses where each has one."""
    every, saves = config.eval.every_steps, config.checkpoint.every_steps
    goes_by_it = is_eval_column(config.run.metric) and config.checkpoint.keep_best > 0
    if not goes_by_it or not every or saves is None:
        return
    found = (
        f"checkpoint.keep_best={config.checkpoint.keep_best} by run.metric={config.run.metric} needs an "
        "evaluation at each save"
    )
    if config.checkpoint.every_s is not None:
        yield (
            f"{found}: with checkpoint.every_s={config.checkpoint.every_s:g} nobody knows beforehand which "
            f"steps are saved; give checkpoint.every_steps, a multiple of eval.every_steps={every}"
        )
    elif isinstance(saves, str) or saves % every:
        yield (
            f"{found}: checkpoint.every_steps={saves} is no multiple of eval.every_steps={every}; make it one"
        )


def _paths(data: DataConfig) -> list[str]:
    if data.source != Source.tokens:
        return []
    return [path for path in (data.path, *(part.path for part in data.blend)) if path is not None]


def _packed_with(data: DataConfig) -> tuple[str, str, int] | None:
    """Return name and checksum of what made the tokens, and the token that ends documents; None where no
    index can be read here.
    """
    if data.source == Source.stdlib:
        return _BYTES
    for path in _paths(data):
        local = local_prefix(token_file_prefix(path))
        try:
            index: TokenIndex | None = None if local is None else read_index(Path(f"{local}.json"))
        except DataError:
            index = None
        if index is not None:
            # Of a file alone its content counts: it may have another name.
            name = "" if index.tokenizer_sha256 else index.tokenizer
            return name, index.tokenizer_sha256, index.separator_id
    return None
