"""`orchestra plan [overrides]` without more: one configuration, predicted and printed."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, fields
from textwrap import wrap
from typing import Any

from conf.schema import Config
from orchestra.cli.plan import goodput_mode, layout_words
from orchestra.cli.text import figures
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_DONE
from orchestra.plan.assemble import case_of, for_planning
from orchestra.plan.case import PlanCase, has_idle_stage
from orchestra.plan.predict import HostMemory, Prediction, StepTime, host_memory, over_time, predict
from orchestra.plan.stage_memory import Memory, fits
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.memory import USABLE_SHARE
from orchestra.sizes.units import GIB, MIB
from orchestra.submit.memory_check import advice

_HOUR_S = 3600
_WIDTH = 80
_BAR_WIDTH = 40
_NAME_WIDTH = 26

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


def lines(config: Config, prediction: Prediction) -> list[str]:
    """Return what a person reads, at most 80 columns wide."""
    case = prediction.case
    return [
        *header(case),
        "",
        *_memory(prediction),
        "",
        *_time(prediction.time),
        "",
        *_speed(prediction),
        *_cost(config, prediction),
        *wrap(_goodput(config, prediction), _WIDTH, subsequent_indent=" " * 8),
        *_sources(case),
    ]


def _goodput(config: Config, prediction: Prediction) -> str:
    found = goodput_mode.summary(config, prediction)
    return found if config.checkpoint.every_steps is None else f"{found}; by Daly's formula"


def _sources(case: PlanCase) -> list[str]:
    """Say what the figures rest on: what is measured or fitted, and what a data sheet says."""
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
        for line in wrap(text, _WIDTH, initial_indent=indent if number else "", subsequent_indent=indent)
    ]


def header(case: PlanCase) -> list[str]:
    """Return what is predicted: model, layout, batch and devices."""
    model, mesh = case.model, case.layout
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    used = [f"dp {mesh.dp}", *(f"{axis} {size}" for axis, size in degrees.items() if size > 1)]
    over = f" over {case.num_shards} ranks" if case.num_shards < mesh.dp * mesh.cp else ""
    used += [f"zero {case.zero}{over}"] if case.zero else []
    used += ["sequence parallel"] if case.sequence_parallel and mesh.tp > 1 else []
    size = case.tokens_per_step // case.seq_len
    parts = f"micro-batch {case.micro_batch_size} × accumulation {case.accumulation} × dp {mesh.dp}"
    nodes = f"{case.num_nodes} node{'s' if case.num_nodes > 1 else ''}"
    return [
        f"model   {layout_words.model(model)}, {case.precision.value}",
        f"layout  {', '.join(used)}",
        f"batch   {size:,} × {case.seq_len:,} = {case.tokens_per_step:,} tokens",
        f"        {parts}, recompute {case.recompute.value}",
        f"device  {mesh.world_size:,} × {case.device.name} on {nodes}",
    ]


def _memory(prediction: Prediction) -> list[str]:
    peak, device = prediction.peak, prediction.case.device
    stage = prediction.stages.index(peak) + 1
    where = f", stage {stage} of {len(prediction.stages)}" if len(prediction.stages) > 1 else ""
    scale, unit = _scale(peak)
    total, limit = peak.total / scale, device.memory_bytes / scale
    suffices = fits(prediction.case, prediction.stages)
    verdict = "fits" if suffices else "does not fit"
    return [
        f"memory  {total:,.1f} of {limit:,.1f} {unit}, {USABLE_SHARE * limit:,.1f} usable{where}: {verdict}",
        *_idle(prediction.case, suffices),
        *_bars({name: value / scale for name, value in components(peak).items()}, unit, total),
        *_over_time(prediction),
    ]


def _idle(case: PlanCase, suffices: bool) -> list[str]:
    """Say why a layout does not do whose memory may suffice."""
    if not has_idle_stage(case.stages):
        return []
    joint = "but" if suffices else "and"
    return [f"        {joint} a pipeline stage has nothing to do: use a smaller parallelism.pp"]


def _over_time(prediction: Prediction) -> list[str]:
    """What is there before training, in the first step and later; and what lies in host memory."""
    case, index = prediction.case, prediction.stages.index(prediction.peak)
    stage = case.stages[index]
    times, host = over_time(case, stage, prediction.peak), host_memory(case, stage)
    steps = [times.built, times.first_step, times.later_steps]
    scale, unit = _scale(prediction.peak)
    built, first, later = (_three_digits(value / scale) for value in steps)
    found = [f"  over time: built {built}, first step {first}, later steps {later} {unit}"]
    if host.total:
        each, node = (_three_digits(host.total * ranks / scale) for ranks in (1, case.devices_per_node))
        found.append(f"  host memory: {each} {unit} a rank, {node} {unit} a node:")
        found.append(f"    {_host_words(host)}")
    return found


def _scale(peak: Memory) -> tuple[int, str]:
    """GiB, or MiB for what is less than one."""
    return (GIB, "GiB") if peak.total >= GIB else (MIB, "MiB")


def _host_words(host: HostMemory) -> str:
    words = {"offloaded state": host.offloaded, "image of a checkpoint": host.checkpoint_image}
    return " and ".join(name for name, value in words.items() if value)


def _time(time: StepTime) -> list[str]:
    scale, unit = (1.0, "s") if time.total >= 1 else (1e3, "ms")
    parts = {name: scale * value for name, value in parts_of_time(time).items()}
    return [f"step    {_three_digits(scale * time.total)} {unit}", *_bars(parts, unit, scale * time.total)]


def _bars(values: Mapping[str, float], unit: str, total: float) -> list[str]:
    """One line for each value that is a thousandth of the total or more, with a bar by the largest."""
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


def parts_of_time(time: StepTime) -> dict[str, float]:
    return {title: float(getattr(time, name)) for name, title in _PARTS.items()}


def _speed(prediction: Prediction) -> list[str]:
    each, whole = prediction.tokens_per_s_per_device, prediction.tokens_per_s
    shares = f"MFU {figures.percent(prediction.mfu)}, HFU {figures.percent(prediction.hfu)}"
    return [f"speed   {each:,.0f} tokens/s per device, {figures.quantity(whole)} in all; {shares}"]


def _cost(config: Config, prediction: Prediction) -> list[str]:
    seconds = config.train.steps * prediction.time.total
    hours = seconds / _HOUR_S * prediction.case.layout.world_size
    tokens = config.train.steps * prediction.case.tokens_per_step
    amount = f"{figures.quantity(float(tokens))} tokens in {figures.duration(seconds)}"
    return [f"cost    {config.train.steps:,} steps: {amount}, {_three_digits(hours)} GPU-hours"]


def facts(config: Config, prediction: Prediction) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of 1."""
    case, seconds = prediction.case, config.train.steps * prediction.time.total
    return {
        "model": case.model.name,
        "num_parameters": num_parameters(case.model),
        "num_active_parameters": num_active_parameters(case.model),
        "layout": asdict(case.layout),
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
        "stages": [_whole_bytes(memory) for memory in prediction.stages],
        "memory_over_time_bytes": _over_time_bytes(prediction),
        "step_time_s": prediction.time.total,
        "step_time_parts_s": {name: getattr(prediction.time, name) for name in _PARTS},
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "steps": config.train.steps,
        "run_s": seconds,
        "gpu_hours": seconds / _HOUR_S * case.layout.world_size,
        "failures": goodput_mode.summary_facts(config, prediction),
    }


def _over_time_bytes(prediction: Prediction) -> dict[str, int]:
    case = prediction.case
    stage = case.stages[prediction.stages.index(prediction.peak)]
    times, host = over_time(case, stage, prediction.peak), host_memory(case, stage)
    found = {name: round(value) for name, value in asdict(times).items()}
    return {**found, "host": round(host.total)}


def _whole_bytes(memory: Memory) -> dict[str, int]:
    return {f"{field.name}_bytes": round(getattr(memory, field.name)) for field in fields(memory)}


def run(arguments: Namespace) -> int:
    """Print the prediction and return 0. Raises ConfigError for what cannot be predicted."""
    config, prediction = predicted(arguments)
    if arguments.json:
        print(json.dumps(facts(config, prediction), indent=2))
        return EXIT_DONE
    for line in lines(config, prediction):
        print(line)
    if not prediction.fits:
        _note_what_would_help(config, prediction)
    _note_what_was_assumed(arguments.overrides, prediction)
    return EXIT_DONE


def predicted(arguments: Namespace) -> tuple[Config, Prediction]:
    """Return the configuration that the command line gives, and what is predicted of it."""
    config = compose(for_planning(arguments.overrides), Situation("plan")).config
    return config, predict(case_of(config, arguments.framework or "orchestra"))


def _note_what_would_help(config: Config, prediction: Prediction) -> None:
    """Say what saves enough memory; where a stage is idle, no memory helps."""
    case = prediction.case
    found = None if has_idle_stage(case.stages) else advice(config, Situation("plan"), case.framework.name)
    if found is not None:
        print(f"note: {found}", file=sys.stderr)


def _note_what_was_assumed(typed: list[str], prediction: Prediction) -> None:
    if any(each.startswith(("cluster", "+cluster", "experiment=")) for each in typed):
        return
    case = prediction.case
    words = f"one node of {case.devices_per_node} {case.device.name}"
    print(f"note: {words} assumed (cluster.nodes, cluster.hardware)", file=sys.stderr)
