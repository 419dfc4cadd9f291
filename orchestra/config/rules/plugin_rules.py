"""Rules about plug-ins: that they are there, take their options, and go with what else is configured."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter

from conf.schema import Config, Offload, OptimConfig, PrecisionName
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.plugin_facts import plugin_facts
from orchestra.plugins import is_plugin, no_separator, other_source

# What AdamW alone reads, and where another optimizer is told the same.
_ADAMW_ALONE = ("weight_decay", "betas", "eps", "state_dtype")


def rule_plugins(config: Config, _: Situation) -> Iterator[str]:
    yield from plugin_facts(config).problems


def rule_loss(config: Config, _: Situation) -> Iterator[str]:
    train = config.train
    if train.loss is None:
        if train.loss_options:
            yield (
                f"train.loss_options={shown(train.loss_options)} without train.loss; name the loss, or "
                "leave them out"
            )
        return
    if config.parallelism.tp > 1:
        yield (
            f"parallelism.tp={config.parallelism.tp} divides the words over ranks, and train.loss="
            f"{train.loss} takes logits of all words; use parallelism.tp=1"
        )
    if config.precision.fp8_output:
        yield (
            f"precision.fp8_output=true rounds cross-entropy's gradients, and train.loss={train.loss} is "
            "another loss; use precision.fp8_output=false"
        )


def rule_tensorboard(config: Config, _: Situation) -> Iterator[str]:
    # What an image holds is not known here; rank 0 says so then.
    is_elsewhere = config.cluster.container.image is not None
    if config.train.tensorboard and not is_elsewhere and find_spec("tensorboard") is None:
        yield (
            "train.tensorboard=true needs the package tensorboard, which is not installed; pip install "
            "'orchestra-train[tensorboard]', or use train.tensorboard=false"
        )


def rule_callbacks(config: Config, _: Situation) -> Iterator[str]:
    train = config.train
    names = [target.rpartition(":")[2] for target in train.callbacks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"train.callbacks={shown(train.callbacks)} has {name} twice, and options go by the name; "
            "give one another name where it is defined"
        )
    for name, options in train.callbacks_options.items():
        if name not in names:
            known = f"use one of {', '.join(names)}" if names else "name callbacks in train.callbacks"
            yield f"train.callbacks_options.{name}: no callback has this name; {known}"
        elif not isinstance(options, dict):
            yield (
                f"train.callbacks_options.{name}={shown(options)} are no options; use "
                f"train.callbacks_options.{name}.OPTION=VALUE"
            )


def rule_block(config: Config, _: Situation) -> Iterator[str]:
    """What goes by the names, products or sizes of the family's own layers."""
    model, parallelism = config.model, config.parallelism
    if model.block is None:
        if model.block_options:
            yield (
                f"model.block_options={shown(model.block_options)} without model.block; name the layer, or "
                "leave them out"
            )
        return
    said = f"model.block={model.block}"
    if parallelism.tp > 1:
        yield (
            f"parallelism.tp={parallelism.tp} cuts the matrices of the family's own layers, and {said} may "
            "compute anything with its own; use parallelism.tp=1"
        )
    if parallelism.cp > 1:
        yield (
            f"parallelism.cp={parallelism.cp} divides sequences, and {said} may mix their tokens anywhere; "
            "use parallelism.cp=1"
        )
    if config.precision.name is PrecisionName.fp8:
        yield f"precision=fp8 puts products in the family's own layers, and {said}; use precision=bf16"
    if config.train.recompute_budget_gib is not None:
        yield (
            f"train.recompute_budget_gib={config.train.recompute_budget_gib:g} counts activations of the "
            f"family's own layers, and {said}; use train.recompute"
        )
    if model.init_from is not None:
        yield (
            f"model.init_from={model.init_from} holds a Llama's layers, and {said}; use model.init_from=null"
        )


def rule_source(config: Config, _: Situation) -> Iterator[str]:
    """The model must know every token of a plug-in's data, and a run keeps those that it began with."""
    data, facts = config.data, plugin_facts(config)
    for key, size in facts.vocabularies.items():
        if size > config.model.vocab_size:
            yield (
                f"model.vocab_size={config.model.vocab_size} is below the {size} tokens of {key}; use {size} "
                "or more"
            )
    if not is_plugin(data.source):
        if data.source_options:
            yield (
                f"data.source_options={shown(data.source_options)} without a plug-in as data.source; name "
                "it, or leave them out"
            )
        return
    if None not in (facts.identity, data.source_identity) and facts.identity != data.source_identity:
        yield other_source(data, str(facts.identity))
    if data.document_masks and "data.source" not in facts.separators:
        yield no_separator(data.source)


def rule_optimizer(config: Config, _: Situation) -> Iterator[str]:
    optim, parallelism = config.optim, config.parallelism
    if optim.target is None:
        if optim.options:
            yield (
                f"optim.options={shown(optim.options)} without optim.target; name the optimizer they are of, "
                "or leave them out"
            )
        return
    said = f"optim.target={optim.target}"
    for name in _ADAMW_ALONE:
        value = attrgetter(name)(optim)
        if value != attrgetter(name)(OptimConfig()):
            yield f"optim.{name}={shown(value)} is AdamW's alone; use optim.options.{name} if there is one"
    if parallelism.offload is not Offload.none:
        yield (
            f"parallelism.offload={parallelism.offload.name} updates unit by unit in the host's memory, as "
            f"orchestra's AdamW alone does, and {said}; use parallelism.offload=none"
        )
    facts = plugin_facts(config)
    if parallelism.tp > 1 and facts.gathers:
        yield (
            f"parallelism.tp={parallelism.tp}: {said} needs whole matrices, and those that tensor "
            "parallelism has cut are not put together; use tp=1"
        )
    elif facts.parts_problem and (key := _divides_parameters(config)):
        yield (
            f"parallelism.{key}={getattr(parallelism, key)}: {said} needs whole parameters "
            f"({facts.parts_problem}), and ranks would have parts; use parallelism.zero=0, tp=1 and ep=1"
        )
    elif facts.apart_problem and parallelism.ep > 1:
        yield (
            f"parallelism.ep={parallelism.ep}: {said} takes all parameters together "
            f"({facts.apart_problem}), and each rank would have its own experts; use parallelism.ep=1"
        )
    if facts.apart_problem and parallelism.pp > 1:
        yield (
            f"parallelism.pp={parallelism.pp}: {said} takes all parameters together "
            f"({facts.apart_problem}), and each stage would have its own; use parallelism.pp=1"
        )


def _divides_parameters(config: Config) -> str | None:
    """Return the key by which a rank has parts of parameters; None where it has whole ones."""
    parallelism = config.parallelism
    degrees = {"zero": parallelism.zero + 1, "tp": parallelism.tp, "ep": parallelism.ep}
    return next((key for key, degree in degrees.items() if degree > 1), None)
