"""`orchestra plan [overrides]` without more: one configuration, predicted and printed."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conf.schema import Config, LauncherName, ModelConfig, PrecisionName, TrainConfig
from launchers import LauncherError
from launchers.slurm.switches import fabric
from orchestra.cli.plan import case_for, configuration, goodput_mode, layout_words, print_result
from orchestra.cli.text import axis_links, figures
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.plan.case import PlanCase, has_idle_stage
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import (
    Prediction,
    StepTime,
    disk_bytes,
    host_memory,
    over_time,
    predict,
    run_seconds,
)
from orchestra.plan.stage_memory import Memory, fits
from orchestra.sizes import topology
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.topology import batch_ramp
from orchestra.sizes.units import GIB, MIB
from orchestra.submit.submission import advice

_HOUR_S = 3600
_BAR_WIDTH = 40
_NAME_WIDTH = 26
# Where attention counted in full makes MFU so much larger, the other convention's stands beside it.
_CAUSAL_SHARE = 7 / 8

_COMPONENTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "accumulation": "fp32 gradients",
    "masters": "master weights",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "communication buffers",
    "framework": "framework",
}
_PARTS = {
    "compute": "compute",
    "tensor_parallel": "collectives in the layers",
    "host": "waiting for the host",
    "hand_over": "between stages",
    "bubble": "pipeline bubble",
    "reduction": "reducing gradients",
    "optimizer": "optimizer",
}


def run(arguments: Namespace) -> int:
    """Print the prediction and return 0, or 1 where it does not fit. Raises ConfigError for what is wrong."""
    config = configuration(arguments.overrides)
    prediction = predict(case_for(config, arguments))
    print_result(arguments, lambda: _facts(config, prediction), lambda: _lines(config, prediction))
    code = EXIT_DONE if fits(prediction.case, prediction.stages) else EXIT_FAILED
    if arguments.json:
        return code
    case = prediction.case
    # Where a stage is idle, no memory helps.
    if not prediction.fits and not has_idle_stage(case.stages):
        remedy = advice(config, Situation("plan"), case.framework.name)
        if remedy is not None:
            print(f"note: {remedy}", file=sys.stderr)
    if not any(each.startswith(("cluster", "+cluster", "experiment=")) for each in arguments.overrides):
        words = f"one node of {case.devices_per_node} {case.device.name}"
        print(f"note: {words} assumed (cluster.nodes, cluster.hardware)", file=sys.stderr)
    return code


def _lines(config: Config, prediction: Prediction) -> list[str]:
    return [
        *header(config.train, prediction.case),
        *_about_block(prediction.case.model),
        "",
        *_memory(prediction),
        "",
        *_time(prediction.time),
        *_range(prediction),
        "",
        *_speed(prediction),
        *_routing(prediction),
        *_cost(config, prediction),
        *figures.wrapped(goodput_mode.summary(config, prediction), indent=" " * 8),
        *_leaves(config, prediction.case),
        *_sources(prediction.case),
    ]


def _leaves(config: Config, case: PlanCase) -> list[str]:
    """Return over how many leaf switches or blocks such a job lies at least, where Slurm tells."""
    if config.cluster.launcher is not LauncherName.slurm:
        return []
    limit = config.cluster.max_switches
    asked = [] if limit is None else [f"at most {limit} asked for (cluster.max_switches)"]
    try:
        known = fabric()
    except LauncherError:
        known = None
    if known is not None:
        asked.insert(0, f"{known.words}, of which {case.num_nodes} nodes need {known.least(case.num_nodes)}")
    return [f"leaves  {'; '.join(asked)}"] if asked else []


def _about_block(model: ModelConfig) -> list[str]:
    """Return what of layers that are a plug-in is not known."""
    if model.block is None:
        return []
    said = f"{model.block}: its parameters are counted; activations and time are those of the family's own"
    return figures.wrapped(f"layers  {said} layers of these sizes", "", " " * 8)


def _sources(case: PlanCase) -> list[str]:
    """Return what the figures rest on: what is measured or fitted, and what a data sheet says."""
    device = case.device
    texts = [f"profile {case.framework.name}: {case.framework.source};", f"network: {case.network.source}"]
    # A measured profile has no data sheet.
    if device.data_sheet:
        texts[-1] += ";"
        texts.append(f"device: {device.data_sheet}; shares of its peak: {device.reached}")
    indent = " " * 8
    return [
        line
        for number, text in enumerate(texts)
        for line in figures.wrapped(text, indent if number else "", indent)
    ]


def header(train: TrainConfig, case: PlanCase) -> list[str]:
    """Return what is predicted: model, layout, batch and devices. Of a ramp it is its last batch."""
    model, mesh = case.model, case.layout
    used = [*layout_words.degrees(mesh), *layout_words.zero(case)]
    used += ["sequence parallel"] if case.sequence_parallel and mesh.tp > 1 else []
    parts = f"micro-batch {case.micro_batch_size} × accumulation {case.accumulation} × dp {mesh.dp}"
    nodes = f"{case.num_nodes} node{'s' if case.num_nodes > 1 else ''}"
    return [
        *layout_words.model_lines(model, case.precision),
        f"layout  {', '.join(used)}",
        *(f"        schedule {words}" for words in layout_words.schedule(case)),
        *layout_words.batch(train, case.tokens_per_step // case.seq_len),
        f"        {parts}, recompute {case.recompute.value}",
        f"device  {mesh.world_size:,} × {case.device.name} on {nodes}",
        *axis_links.lines(
            mesh, case.devices_per_node, case.device.link_bytes_per_s, case.network.adapter_bytes_per_s
        ),
    ]


def _memory(prediction: Prediction) -> list[str]:
    peak, device = prediction.peak, prediction.case.device
    stage = prediction.stages.index(peak) + 1
    where = f", stage {stage} of {len(prediction.stages)}" if len(prediction.stages) > 1 else ""
    scale, unit = _scale(peak)
    total, limit, usable = (size / scale for size in (peak.total, device.memory_bytes, device.usable_bytes))
    suffices = fits(prediction.case, prediction.stages)
    verdict = "fits" if suffices else "does not fit"
    shown = f"{total:,.1f} of {limit:,.1f} {unit}, {usable:,.1f} usable"
    lines = [f"memory  {shown}{where}: {verdict}"]
    if has_idle_stage(prediction.case.stages):
        joint = "but" if suffices else "and"
        lines.append(f"        {joint} a pipeline stage has nothing to do: use a smaller parallelism.pp")
    return [
        *lines,
        *_bars({name: value / scale for name, value in components(peak).items()}, unit, total),
        *_over_time(prediction),
    ]


def _over_time(prediction: Prediction) -> list[str]:
    """Return what is there before training, in the first step and later; and what lies beside the device."""
    times, host = over_time(prediction), host_memory(prediction)
    scale, unit = _scale(prediction.peak)
    built, first, later = (_three_digits(value / scale) for value in asdict(times).values())
    lines = [f"  over time: built {built}, first step {first}, later steps {later} {unit}"]
    ranks = prediction.case.devices_per_node
    if host.total:
        each, node = (_three_digits(host.total * number / scale) for number in (1, ranks))
        words = {
            "offloaded state": host.offloaded,
            "image of a checkpoint": host.checkpoint_image,
            "copies in memory": host.copies,
        }
        lines.append(f"  host memory: {each} {unit} a rank, {node} {unit} a node:")
        lines.append(f"    {', '.join(name for name, value in words.items() if value)}")
    if disk := disk_bytes(prediction):
        each, node = (_three_digits(disk * number / scale) for number in (1, ranks))
        what = "state and image of a checkpoint" if prediction.case.options.saves else "state"
        lines.append(f"  disk: {each} {unit} a rank, {node} {unit} a node: {what}")
    return lines


def _scale(peak: Memory) -> tuple[int, str]:
    """Return GiB, or MiB for what is less than one."""
    return (GIB, "GiB") if peak.total >= GIB else (MIB, "MiB")


def _time(time: StepTime) -> list[str]:
    scale, unit = (1.0, "s") if time.total >= 1 else (1e3, "ms")
    parts = {title: scale * getattr(time, name) for name, title in _PARTS.items()}
    return [f"step    {_three_digits(scale * time.total)} {unit}", *_bars(parts, unit, scale * time.total)]


def _bars(values: Mapping[str, float], unit: str, total: float) -> list[str]:
    """Return one line for each value that is a thousandth of the total or more, with a bar by the largest."""
    largest = max([*values.values(), 1e-12])
    shown = {name: value for name, value in values.items() if value >= total / 1000}
    bars = {name: "█" * round(_BAR_WIDTH * value / largest) for name, value in shown.items()}
    return [
        f"  {name:<{_NAME_WIDTH}}{_three_digits(value):>7} {unit:<3} {bars[name]}".rstrip()
        for name, value in shown.items()
    ]


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def components(memory: Memory) -> dict[str, float]:
    """Return the bytes of each component by the name people read."""
    return {title: float(getattr(memory, name)) for name, title in _COMPONENTS.items()}


def _range(prediction: Prediction) -> list[str]:
    """Return the times between which a step lies whose pipeline's stages may wait for each other."""
    low, high = prediction.time_if_nothing_waits, prediction.time_if_stages_wait
    if high <= low:
        return []
    return [f"        {low:,.2f} s if nothing waits, {high:,.2f} s if stages wait"]


def _speed(prediction: Prediction) -> list[str]:
    each, whole = prediction.tokens_per_s_per_device, prediction.tokens_per_s
    shares = f"MFU {figures.percent(prediction.mfu)}, HFU {figures.percent(prediction.hfu)}"
    lines = [f"speed   {each:,.0f} tokens/s per device, {figures.quantity(whole)} in all; {shares}"]
    # Of long sequences the conventions are far apart.
    mfu, causal = prediction.mfu, prediction.mfu_causal
    if mfu is not None and causal is not None and causal < _CAUSAL_SHARE * mfu:
        lines.append(f"        MFU {figures.percent(causal)} with causal attention counted as half")
    return lines


def _routing(prediction: Prediction) -> list[str]:
    texts = layout_words.routing(prediction)
    if texts and prediction.case.precision is PrecisionName.fp16 and prediction.case.framework.name == OWN:
        texts.append("experts in fp16 are counted as in bf16, which alone has a kernel for all of them")
    return [line for text in texts for line in figures.wrapped(text, "experts ", " " * 8)]


def _cost(config: Config, prediction: Prediction) -> list[str]:
    seconds = run_seconds(prediction, config.train)
    hours = seconds / _HOUR_S * prediction.case.layout.world_size
    tokens = batch_ramp(config.train, prediction.case.layout.dp).sequences_through(config.train.steps)
    tokens *= config.train.seq_len
    amount = f"{figures.quantity(float(tokens))} tokens in {figures.duration(seconds)}"
    return [f"cost    {config.train.steps:,} steps: {amount}, {_three_digits(hours)} GPU-hours"]


def _facts(config: Config, prediction: Prediction) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    case, seconds = prediction.case, run_seconds(prediction, config.train)
    return {
        "model": case.model.name,
        "num_parameters": num_parameters(case.model),
        "num_active_parameters": num_active_parameters(case.model),
        "layout": asdict(case.layout),
        "schedule": case.schedule.name,
        "virtual_stages": case.pipeline.num_chunks,
        "links": [asdict(link) for link in topology.axis_links(case.layout, case.devices_per_node)],
        "zero": case.zero,
        "sequence_parallel": case.sequence_parallel,
        "recompute": case.recompute.value,
        "precision": case.precision.value,
        "micro_batch_size": case.micro_batch_size,
        "accumulation": case.accumulation,
        "tokens_per_step": case.tokens_per_step,
        "device": case.device.name,
        "device_sources": {"figures": case.device.data_sheet, "reached": case.device.reached},
        "num_nodes": case.num_nodes,
        "framework": case.framework.name,
        "device_memory_bytes": round(case.device.memory_bytes),
        "fits": prediction.fits,
        "peak_memory_bytes": round(prediction.peak.total),
        "stages": [
            {f"{name}_bytes": round(size) for name, size in asdict(memory).items()}
            for memory in prediction.stages
        ],
        "memory_over_time_bytes": {
            **{name: round(size) for name, size in asdict(over_time(prediction)).items()},
            "host": round(host_memory(prediction).total),
            "disk": round(disk_bytes(prediction)),
        },
        "step_time_s": prediction.time.total,
        "step_time_range_s": {
            "if_nothing_waits": prediction.time_if_nothing_waits,
            "if_stages_wait": prediction.time_if_stages_wait,
        },
        "step_time_parts_s": {name: getattr(prediction.time, name) for name in _PARTS},
        "routing": layout_words.routing_facts(prediction),
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "mfu_causal": prediction.mfu_causal,
        "hfu": prediction.hfu,
        "steps": config.train.steps,
        "run_s": seconds,
        "gpu_hours": seconds / _HOUR_S * case.layout.world_size,
        "failures": goodput_mode.summary_facts(config, prediction),
    }
