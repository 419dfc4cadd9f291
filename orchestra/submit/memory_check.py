"""Whether a configuration fits into its devices' memory, by the planner's count, and what would make it fit.

It says something only where the device is known by name or profile, and nothing of CPUs. The count errs by
7 % in the mean (benchmarks/RESULTS.md), so whoever knows better may submit all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from conf.schema import Config, Device, Recompute
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.frameworks import OWN, USABLE_SHARE
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.profiles import is_profile, read_profile
from orchestra.sizes.topology import batch_shape, divisors, has_open_micro_batch, layout
from orchestra.sizes.units import GIB

SKIP = "--skip-memory-check"
_NUM_COMPONENTS = 3
_MOST_TIMES_THE_NODES = 64

Changes = dict[str, int | str | bool]
"""Values by their keys, `section.name`."""


def memory_problems(config: Config, situation: Situation) -> Iterator[str]:
    """Yield why the devices' memory does not suffice, with the changes that would help.

    Raises ConfigError where the configuration names a profile that cannot be read.
    """
    prediction = _prediction(config, OWN)
    if prediction is None or prediction.fits:
        return
    device, peak = prediction.case.device, prediction.peak
    parts = asdict(peak)
    largest = sorted(parts, key=lambda name: -parts[name])[:_NUM_COMPONENTS]
    shares = ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in largest)
    found = f"a rank would need about {peak.total / GIB:.1f} GiB of the {device.name}'s"
    usable = f"{USABLE_SHARE * device.memory_bytes / GIB:.1f} usable"
    limit = f"{device.memory_bytes / GIB:.1f} GiB, {usable} ({shares})"
    yield f"memory: {found} {limit}; {_what_helps(config, situation, OWN)}; {SKIP} submits it all the same"


def advice(config: Config, situation: Situation, framework_name: str) -> str | None:
    """Return what makes it fit by a framework's count: single changes, of each kind the smallest; else as few
    kinds as will do. Only what orchestra's trainer has; None where the device is no known GPU.
    """
    if _prediction(config, framework_name) is None:
        return None
    return _what_helps(config, situation, framework_name)


def _what_helps(config: Config, situation: Situation, framework_name: str) -> str:
    kinds = (_recompute, _micro_batch, _zero, _tensor, _nodes)
    single = [_first_fitting(config, kind(config), situation, framework_name) for kind in kinds]
    words = [found for found in single if found is not None]
    if not words:
        together = _together(config, kinds, situation, framework_name)
        words = [together] if together is not None else []
    if words:
        return f"it would fit with {' or with '.join(words)}"
    return "neither recomputation nor ZeRO nor tensor parallelism nor more nodes make it fit"


def _together(
    config: Config,
    kinds: Sequence[Callable[[Config], list[Changes]]],
    situation: Situation,
    framework_name: str,
) -> str | None:
    """Return the first that fits, of one kind after the other on top of the strongest of those before."""
    base: Changes = {}
    for kind in kinds:
        on_top = [{**base, **changes} for changes in kind(_changed(config, base))]
        found = _first_fitting(config, on_top, situation, framework_name)
        if found is not None:
            return found
        legal = [changes for changes in on_top if not problems_of(_changed(config, changes), situation)]
        base = legal[-1] if legal else base
    return None


def _first_fitting(
    config: Config, choices: Sequence[Changes], situation: Situation, framework_name: str
) -> str | None:
    """Return the first legal choice that fits, as overrides with what it needs."""
    for changes in choices:
        candidate = _changed(config, changes)
        if problems_of(candidate, situation):
            continue
        prediction = _prediction(candidate, framework_name)
        if prediction is not None and prediction.fits:
            words = " ".join(f"{key}={shown(value)}" for key, value in changes.items())
            return f"{words} ({prediction.peak.total / GIB:.1f} GiB)"
    return None


def _prediction(config: Config, framework_name: str) -> Prediction | None:
    """Return the prediction; None where the device's figures are not known.

    Raises ConfigError where the configuration names a profile that cannot be read.
    """
    cluster = config.cluster
    profile = read_profile(Path(cluster.hardware)) if is_profile(cluster.hardware) else None
    is_open = cluster.hardware == "auto" or not isinstance(cluster.gpus_per_node, int)
    if cluster.device is not Device.cuda or is_open:
        return None
    if has_open_micro_batch(config.train):
        # The ranks will find the largest that fits: only a single sequence that does not is a problem.
        config = _changed(config, {"train.micro_batch_size": 1})
    try:
        return predict(case_of(config, framework_name, profile))
    except ConfigError:
        # A device without figures is no reason to refuse a job.
        return None


def _changed(config: Config, changes: Changes) -> Config:
    for key, value in changes.items():
        section, name = key.split(".")
        typed = Recompute[str(value)] if key == "train.recompute" else value
        config = replace(config, **{section: replace(getattr(config, section), **{name: typed})})
    return config


def _recompute(config: Config) -> list[Changes]:
    if config.train.recompute_budget_gib is not None:
        return []
    kinds = list(Recompute)
    return [{"train.recompute": kind.value} for kind in kinds[kinds.index(config.train.recompute) + 1 :]]


def _micro_batch(config: Config) -> list[Changes]:
    ranks = layout(config.parallelism, config.cluster.nodes * int(config.cluster.gpus_per_node))
    now = 1 if has_open_micro_batch(config.train) else batch_shape(config.train, ranks.dp).micro_batch_size
    smaller = [size for size in divisors(now) if size < now]
    return [{"train.micro_batch_size": size} for size in reversed(smaller)]


def _zero(config: Config) -> list[Changes]:
    return [{"parallelism.zero": stage} for stage in range(config.parallelism.zero + 1, 4)]


def _tensor(config: Config) -> list[Changes]:
    wider = [
        degree
        for degree in divisors(int(config.cluster.gpus_per_node))
        if degree > config.parallelism.tp and degree % config.parallelism.tp == 0
    ]
    return [{"parallelism.tp": degree, "parallelism.sequence_parallel": True} for degree in wider]


def _nodes(config: Config) -> list[Changes]:
    times = [2**power for power in range(1, _MOST_TIMES_THE_NODES.bit_length())]
    return [{"cluster.nodes": config.cluster.nodes * more} for more in times]
