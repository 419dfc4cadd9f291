"""How layouts and what binds them are written: one row of a table, one line, one JSON object. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conf.schema import ModelConfig, PipelineSchedule, PrecisionName, Recompute, TrainConfig
from orchestra.cli.text import figures
from orchestra.cli.text.describe import ramp_lines
from orchestra.plan.case import PlanCase
from orchestra.plan.explain import MEMORY, PARTS, Bound
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction
from orchestra.plan.space import MeshDegrees, Value, choice_of
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.topology import Layout
from orchestra.sizes.units import GIB

HEADER = ("dp", "tp", "pp", "cp", "ep", "zero", "batch", "recompute", "tok/s", "MFU", "GiB")
# How a mixture's tokens come to their experts: as a router says, or as many to each.
REAL, FORCED = "real routing", "forced-balanced"
_KNOB_WORDS = {"shard_degree": "zero over", "micro_batch_size": "micro-batch"}


def row(prediction: Prediction) -> tuple[str, ...]:
    """Return a layout as cells under `HEADER`; tokens/s are per device, `batch` is micro-batch × steps,
    and zero 3/8 shards over 8 of the data-parallel ranks.
    """
    case, choice = prediction.case, choice_of(prediction.case)
    mesh = choice.mesh
    return (
        str(mesh.dp),
        f"{mesh.tp}+sp" if choice.sequence_parallel else str(mesh.tp),
        str(mesh.pp),
        str(mesh.cp),
        str(mesh.ep),
        str(choice.zero) if choice.shard_degree is None else f"{choice.zero}/{choice.shard_degree}",
        f"{choice.micro_batch_size}×{case.accumulation}",
        choice.recompute.value,
        figures.quantity(prediction.tokens_per_s_per_device),
        figures.percent(prediction.mfu),
        gib(prediction.peak.total),
    )


def table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table of layouts 80 columns wide, without pp, cp and ep where nobody uses them."""
    header = tuple(titles)
    unused = [
        title
        for title in ("pp", "cp", "ep")
        if title in header and all(cells[header.index(title)] == "1" for cells in rows)
    ]
    kept = [figures.without(cells, header, unused) for cells in rows]
    shown = figures.without(header, header, unused)
    return figures.fitting_table(shown, kept, figures.WIDTH, ("MFU", "vs best")).splitlines()


def model_lines(config: ModelConfig, precision: PrecisionName) -> list[str]:
    """Return a model's name and size, of a mixture of experts also what one token goes through."""
    active = f", {num_active_parameters(config):,} active" if config.num_experts else ""
    size = f"{config.name}: {num_parameters(config):,} parameters{active}, {precision.value}"
    return figures.wrapped(size, "model   ", " " * 8)


def batch(train: TrainConfig, num_sequences: int) -> list[str]:
    """Return what a step trains on, which of a ramp is its last batch, and how it gets there."""
    num_tokens = num_sequences * train.seq_len
    lines = [*ramp_lines(train), f"batch   {num_sequences:,} × {train.seq_len:,} = {num_tokens:,} tokens"]
    if train.batch_ramp:
        lines.append("        the last of the ramp: times and memory are of it")
    return [part for line in lines for part in figures.wrapped(line, indent=" " * 8)]


def routing(prediction: Prediction) -> list[str]:
    """Return what of a mixture's routing is counted, and what even routing would make of it."""
    case = prediction.case
    if not case.model.num_experts:
        return []
    if case.framework.name != OWN:
        return [f"{FORCED}, as figures of {case.framework.name} are measured; real routing is slower with ep"]
    if case.layout.ep == 1:
        return [f"{REAL}, as fast as {FORCED}: each rank has all experts"]
    assumed = f"{case.framework.uneven_routing:g} times the mean (assumed; moe/rank_load of a run tells)"
    busiest = f"the busiest rank of ep {case.layout.ep} {assumed}"
    even = prediction.if_balanced
    speed = f"{figures.quantity(even.tokens_per_s_per_device)} tokens/s per device"
    return [f"{REAL}: {busiest}; {FORCED} {speed}, {even.time.total:.3g} s a step"]


def routing_facts(prediction: Prediction) -> dict[str, Any] | None:
    """Return the same for programs; None where there are no experts, and the real routing of other trainers
    is None, of which nothing is known.
    """
    case = prediction.case
    if not case.model.num_experts:
        return None
    even, is_own = prediction.if_balanced, case.framework.name == OWN
    return {
        "counted": REAL if is_own else FORCED,
        "busiest_over_mean": case.framework.uneven_routing if case.layout.ep > 1 else 1.0,
        "step_time_s": {REAL: prediction.time.total if is_own else None, FORCED: even.time.total},
        "tokens_per_s_per_device": {
            REAL: prediction.tokens_per_s_per_device if is_own else None,
            FORCED: even.tokens_per_s_per_device,
        },
    }


def gib(num_bytes: float) -> str:
    """Return bytes in GiB: one decimal, two below 1."""
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.2f}"


def of_usable(prediction: Prediction, usable_bytes: float) -> str:
    """Return the peak beside what there is: 31.2 of 72.5 usable GiB."""
    return f"{gib(prediction.peak.total)} of {gib(usable_bytes)} usable GiB"


def degrees(mesh: Layout | MeshDegrees, tp_suffix: str = "") -> list[str]:
    """Return dp, and of the other axes those that are used: dp 4, tp 8."""
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    used = [f"{axis} {size}{tp_suffix if axis == 'tp' else ''}" for axis, size in sizes.items() if size > 1]
    return [f"dp {mesh.dp}", *used]


def schedule(case: PlanCase) -> list[str]:
    """Return a pipeline's schedule in orchestra's trainer, with the stages on each rank where they are more
    than one; nothing without a pipeline, and of other trainers.
    """
    if case.layout.pp == 1 or case.framework.name != OWN:
        return []
    chunks = case.pipeline.num_chunks
    return [f"{case.schedule.name}{f' with {chunks} stages a rank' if chunks > 1 else ''}"]


def schedule_keys(case: PlanCase) -> dict[str, str]:
    """Return the values of a configuration that say a case's schedule."""
    keys = {"parallelism.schedule": case.schedule.name}
    if case.schedule is PipelineSchedule["interleaved"]:
        keys["parallelism.virtual_stages"] = str(case.virtual_stages)
    return keys


def zero(case: PlanCase) -> list[str]:
    """Return ZeRO's stage, with the ranks that it shards over where they are not all; nothing for stage 0."""
    is_whole = case.num_shards >= case.layout.dp * case.layout.cp
    return [f"zero {case.zero}{'' if is_whole else f' over {case.num_shards} ranks'}"] if case.zero else []


def line(prediction: Prediction) -> str:
    """Return a layout in one line: dp 4, tp 8 with sequence parallelism, zero 1, micro-batch 2 × 8, …"""
    case, choice = prediction.case, choice_of(prediction.case)
    words = degrees(choice.mesh, "+sp" if choice.sequence_parallel else "")
    words += [*schedule(case), *zero(case), f"micro-batch {choice.micro_batch_size} × {case.accumulation}"]
    words += [f"recompute {choice.recompute.value}"] if choice.recompute is not Recompute.none else []
    return ", ".join(words)


def value(setting: Value) -> str:
    """Return a knob's value as it is written in a configuration."""
    if setting is None:
        return "null"
    if isinstance(setting, Recompute):
        return setting.value
    return str(setting).lower() if isinstance(setting, bool) else str(setting)


def value_in(prediction: Prediction, name: str) -> str:
    """Return the value that a layout has of a knob."""
    return value(choice_of(prediction.case).value(name))


def knob(name: str, setting: Value) -> str:
    """Return a knob with a value: tp 8, no sequence parallelism."""
    if name == "sequence_parallel":
        return "sequence parallelism" if setting else "no sequence parallelism"
    text = "all" if name == "shard_degree" and setting is None else value(setting)
    return f"{_KNOB_WORDS.get(name, name)} {text}"


def bound(cost: Bound, usable_bytes: float) -> str:
    """Return what binds a layout as a sentence."""
    if cost.name != MEMORY or cost.faster is None or cost.knob is None:
        return f"{cost.name}: {figures.percent(cost.share)} of the step"
    need = f"{gib(cost.faster.peak.total)} of {gib(usable_bytes)} GiB"
    turned = knob(cost.knob, choice_of(cost.faster.case).value(cost.knob))
    return f"memory: {figures.percent(cost.share)} less time with {turned}, but that takes {need}"


def facts(prediction: Prediction) -> dict[str, Any]:
    """Return a layout for programs: bytes, seconds, shares of 1."""
    case, choice = prediction.case, choice_of(prediction.case)
    return {
        **choice.mesh._asdict(),
        "zero": choice.zero,
        "shard": case.layout.shard,
        "sequence_parallel": choice.sequence_parallel,
        "micro_batch_size": choice.micro_batch_size,
        "accumulation": case.accumulation,
        "recompute": choice.recompute.value,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "mfu_causal": prediction.mfu_causal,
        "hfu": prediction.hfu,
        "fits": prediction.fits,
        "peak_memory_bytes": round(prediction.peak.total),
        "step_time_s": prediction.time.total,
        "step_time_parts_s": {name: getattr(prediction.time, name) for name in PARTS},
        "routing": routing_facts(prediction),
    }


def bound_facts(cost: Bound) -> dict[str, Any]:
    """Return what binds a layout for programs."""
    record: dict[str, Any] = {"name": cost.name, "share": cost.share}
    if cost.faster is not None and cost.knob is not None:
        record |= {"knob": cost.knob, "value": value_in(cost.faster, cost.knob)}
        record |= {"peak_memory_bytes": round(cost.faster.peak.total)}
    return record
