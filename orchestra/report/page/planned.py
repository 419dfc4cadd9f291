"""What the plan says of a run, for its page: speed, and memory by component beside what was measured.

Pure but for the run's frozen configuration. Where the plan cannot say it, the page says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.schema import Config, Device
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, shape_of
from orchestra.plan.predict import predict
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record
from orchestra.sizes.flops import model_flops_per_token
from orchestra.sizes.memory.rank_memory import rank_bytes


def resolved(config: Config, starts: Sequence[Mapping[str, Any]]) -> Config:
    """Return the configuration with nodes and ranks as the newest attempt had them, where it says so."""
    start = starts[-1] if starts else {}
    ranks, nodes = start.get("ranks_per_node"), start.get("nodes")
    if not is_whole(ranks) or not is_whole(nodes) or ranks < 1 or nodes < 1:
        return config
    return replace(config, cluster=replace(config.cluster, gpus_per_node=ranks, nodes=nodes))


def flops_per_token(config: Config) -> int | None:
    """Return the model's FLOPs per token, forward and backward; None for layers that are a plug-in."""
    return model_flops_per_token(config.model, config.train.seq_len) if config.model.block is None else None


def speed(config: Config) -> Record:
    """Return what the plan says of the speed, or `why` it says nothing."""
    try:
        prediction = predict(case_of(config))
    except ConfigError as error:
        return {"why": "; ".join(error.problems)}
    return {
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "step_time_s": prediction.time.total,
        "device": prediction.case.device.name,
        "peak_flops_per_s": prediction.case.device.peak_flops,
    }


def memory(config: Config, rows: Sequence[Mapping[str, Any]]) -> Record:
    """Return the planned bytes of rank 0 by component, the measured peak, and what that is a measure of."""
    measured = [row["memory_peak_bytes"] for row in rows if is_number(row.get("memory_peak_bytes"))]
    peak = max(measured, default=None)
    facts: Record = {"measured_peak_bytes": peak, "is_process": config.cluster.device is Device.cpu}
    try:
        shape = shape_of(config)
        planned = rank_bytes(shape, shape.stages[0])
    except ConfigError as error:
        return {**facts, "components": {}, "why": "; ".join(error.problems)}
    return {
        **facts,
        "components": {name: round(size) for name, size in planned.components.items()},
        "planned_bytes": round(planned.total),
        "host_bytes": round(planned.host),
        "disk_bytes": round(planned.disk),
    }
