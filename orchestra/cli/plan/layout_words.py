"""How layouts and what binds them are written: one row of a table, one line, one JSON object. Pure text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from conf.schema import Config, LauncherName, ModelConfig, Recompute
from orchestra.cli.text import figures
from orchestra.config.keys import shown
from orchestra.config.rules.all_rules import TABLE
from orchestra.plan.case import PlanCase
from orchestra.plan.explain import MEMORY, PARTS, Bound
from orchestra.plan.predict import Prediction
from orchestra.plan.space import KEYS, Fixed, Value, choice_of
from orchestra.sizes.flops import num_active_parameters, num_parameters
from orchestra.sizes.units import GIB

HEADER = ("dp", "tp", "pp", "cp", "ep", "zero", "batch", "recompute", "tok/s", "MFU", "GiB")
KNOB_WORDS = {
    "tp": "tp",
    "sequence_parallel": "sequence parallel",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "zero": "zero",
    "shard_degree": "zero over",
    "micro_batch_size": "micro-batch",
    "recompute": "recompute",
}


def row(found: Prediction) -> tuple[str, ...]:
    """Return a layout as cells under `HEADER`; tokens/s are per device, `batch` is micro-batch × steps,
    and zero 3/8 shards over 8 of the data-parallel ranks.
    """
    case, choice = found.case, choice_of(found.case)
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
        figures.quantity(found.tokens_per_s_per_device),
        figures.percent(found.mfu),
        f"{gib(found.peak.total)}",
    )


def model(of: ModelConfig) -> str:
    """Return a model's name and size: of a mixture of experts also what one token goes through."""
    active = f", {num_active_parameters(of):,} active" if of.num_experts else ""
    return f"{of.name}: {num_parameters(of):,} parameters{active}"


def gib(num_bytes: float) -> str:
    """Return bytes in GiB: one decimal, two below 1."""
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.2f}"


def table(titles: Sequence[str], rows: Sequence[tuple[str, ...]], width: int | None = 80) -> list[str]:
    """Return a table of layouts, without pp, cp and ep where nobody uses them."""
    unused = [
        title
        for title in ("pp", "cp", "ep")
        if title in titles and all(it[list(titles).index(title)] == "1" for it in rows)
    ]
    header = figures.without(tuple(titles), tuple(titles), unused)
    kept = [figures.without(it, tuple(titles), unused) for it in rows]
    return figures.fitting_table(header, kept, width, ("MFU",)).splitlines()


def line(found: Prediction) -> str:
    """Return a layout in one line: dp 4, tp 8 with sequence parallelism, zero 1, micro-batch 2 × 8, …"""
    choice = choice_of(found.case)
    mesh = choice.mesh
    words = [f"dp {mesh.dp}"]
    if mesh.tp > 1:
        words.append(f"tp {mesh.tp}{'+sp' if choice.sequence_parallel else ''}")
    others = {"pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    words += [f"{axis} {size}" for axis, size in others.items() if size > 1]
    shards = found.case.num_shards
    over = f" over {shards} ranks" if shards < mesh.dp * mesh.cp else ""
    words += [f"zero {choice.zero}{over}"] if choice.zero else []
    words.append(f"micro-batch {choice.micro_batch_size} × {found.case.accumulation}")
    words += [f"recompute {choice.recompute.value}"] if choice.recompute is not Recompute.none else []
    return ", ".join(words)


def value(of: Value) -> str:
    """Return a knob's value as it is written in a configuration."""
    if of is None:
        return "null"
    if isinstance(of, Recompute):
        return of.value
    return str(of).lower() if isinstance(of, bool) else str(of)


def knob(name: str, of: Value) -> str:
    """Return a knob with a value: tp 8, no sequence parallelism."""
    if name == "sequence_parallel":
        return "sequence parallelism" if of else "no sequence parallelism"
    if name == "shard_degree":
        return f"{KNOB_WORDS[name]} {'all' if of is None else value(of)}"
    return f"{KNOB_WORDS[name]} {value(of)}"


def bound(of: Bound, usable_bytes: float) -> str:
    """Return what binds a layout as a sentence."""
    if of.name != MEMORY or of.faster is None or of.knob is None:
        return f"{of.name}: {figures.percent(of.share)} of the step"
    need = f"{gib(of.faster.peak.total)} of {gib(usable_bytes)} GiB"
    turned = knob(of.knob, choice_of(of.faster.case).value(of.knob))
    return f"memory: {figures.percent(of.share)} less time with {turned}, but that takes {need}"


def facts(found: Prediction) -> dict[str, Any]:
    """Return a layout for programs: bytes, seconds, shares of 1."""
    case, choice = found.case, choice_of(found.case)
    return {
        **choice.mesh._asdict(),
        "zero": choice.zero,
        "shard": case.layout.shard,
        "sequence_parallel": choice.sequence_parallel,
        "micro_batch_size": choice.micro_batch_size,
        "accumulation": case.accumulation,
        "recompute": choice.recompute.value,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_device": found.tokens_per_s_per_device,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "fits": found.fits,
        "peak_memory_bytes": round(found.peak.total),
        "step_time_s": found.time.total,
        "step_time_parts_s": {name: getattr(found.time, name) for name in PARTS},
    }


def bound_facts(of: Bound) -> dict[str, Any]:
    """Return what binds a layout for programs."""
    told: dict[str, Any] = {"name": of.name, "share": of.share}
    if of.faster is not None and of.knob is not None:
        told |= {"knob": of.knob, "value": value(choice_of(of.faster.case).value(of.knob))}
        told |= {"peak_memory_bytes": round(of.faster.peak.total)}
    return told


# From a layout that a search found to the overrides that say it and the command that submits it.


_WIDTH = 80


@dataclass(frozen=True)
class SearchRequest:
    """What a search was asked for: the configuration and the overrides it was composed from, those that were
    typed, the sequences of a step, what stays as it is, what is wrong with its own layout, and notes.
    """

    config: Config
    overrides: tuple[str, ...]
    typed: tuple[str, ...]
    num_sequences: int
    fixed: Fixed
    broken: list[str]
    notes: list[str]


def runs_today(case: PlanCase) -> bool:
    """Whether orchestra's trainer can run a layout: it uses nothing that `not_yet` lists."""
    values = {f"parallelism.{axis}": getattr(case.layout, axis) for axis in ("pp", "cp", "ep")}
    values["model.num_experts"] = case.model.num_experts
    return not any(row.is_asked_for(values[row.key]) for row in TABLE if row.key in values)


def overrides_of(asked: SearchRequest, case: PlanCase) -> list[str]:
    """Return the overrides that turn the configuration into a layout: those in which it differs."""
    config, choice = asked.config, choice_of(case)
    wanted: dict[str, Any] = {key: choice.value(knob) for knob, key in KEYS.items()}
    parallelism, train = config.parallelism, config.train
    if parallelism.dp not in ("auto", case.layout.dp):
        wanted["parallelism.dp"] = "auto"
    wanted["train.recompute_every"] = 1
    wanted["train.recompute_budget_gib"] = None
    if train.global_batch_tokens is None:
        wanted["train.global_batch_size"] = asked.num_sequences
    always = {KEYS["micro_batch_size"]}
    differing = {
        key: value for key, value in wanted.items() if key in always or attrgetter(key)(config) != value
    }
    return [f"{key}={shown(value)}" for key, value in differing.items()]


def command(asked: SearchRequest, case: PlanCase, verb: str | None = None) -> list[str]:
    """Return the command for a layout as lines for a shell, at most 80 columns wide where words allow.

    Without a verb it is the one that trains: `submit`, on this machine `run`.
    """
    trains = "run" if asked.config.cluster.launcher is LauncherName.local else "submit"
    verb = verb or trains
    ours = overrides_of(asked, case)
    replaced = {each.partition("=")[0] for each in ours}
    # What is trained on is up to whoever submits: planning alone needs none.
    typed = [each for each in asked.overrides if each in asked.typed or each != "data=stdlib"]
    kept = [each for each in typed if each.partition("=")[0].lstrip("+") not in replaced]
    return wrapped(["orchestra", verb, *map(shlex.quote, [*kept, *ours])])


def wrapped(words: list[str]) -> list[str]:
    """Break a command between words, each line but the last ending in a backslash."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines
