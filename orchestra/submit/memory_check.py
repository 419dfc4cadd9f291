"""Whether a configuration fits into its devices' memory, by the planner's count, and what would make it fit.

Called by `orchestra submit` before it submits, and by `orchestra plan` for its advice. Only devices known by
name or profile are judged, and never CPUs. The count errs by 7 % in the mean (benchmarks/RESULTS.md), so that
`--skip-memory-check` submits a configuration all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from conf.schema import Config, Device
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.profiles import is_profile, read_profile
from orchestra.sizes.advice import BEFORE_SUBMIT, MemoryNeed, changed, what_helps
from orchestra.sizes.memory import USABLE_SHARE
from orchestra.sizes.topology import has_open_micro_batch
from orchestra.sizes.units import GIB

SKIP = "--skip-memory-check"
_NUM_COMPONENTS = 3


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
    def judge(candidate: Config) -> MemoryNeed | None:
        if problems_of(candidate, situation):
            return None
        prediction = _prediction(candidate, framework_name)
        return None if prediction is None else MemoryNeed(prediction.peak.total, prediction.fits)

    num_ranks = config.cluster.nodes * int(config.cluster.gpus_per_node)
    remedies = what_helps(config, num_ranks, judge, BEFORE_SUBMIT)
    if not remedies:
        return "neither recomputation nor ZeRO nor tensor parallelism nor more nodes make it fit"
    choices = (f"{remedy.overrides} ({remedy.peak_bytes / GIB:.1f} GiB)" for remedy in remedies)
    return f"it would fit with {' or with '.join(choices)}"


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
        config = changed(config, {"train.micro_batch_size": 1})
    try:
        return predict(case_of(config, framework_name, profile))
    except ConfigError:
        # A device without figures is no reason to refuse a job.
        return None
