"""Rules about plug-ins: that they are there, take their options, and go with what else is configured."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from conf.schema import Config, Offload, OptimConfig
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.plugin_facts import plugin_facts

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
    elif facts.parts_problem and (parallelism.zero >= 1 or parallelism.tp > 1):
        key = "zero" if parallelism.zero >= 1 else "tp"
        yield (
            f"parallelism.{key}={getattr(parallelism, key)}: {said} needs whole parameters "
            f"({facts.parts_problem}), and ranks would have parts; use parallelism.zero=0 and tp=1"
        )
