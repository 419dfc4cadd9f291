"""What a run used: GPU-hours, energy, cost, each with a reason where it is not known. Pure but for
`read_spending`.

Shown by `orchestra report` and `orchestra status RUN`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.schema import Config, Device
from orchestra.errors import ConfigError
from orchestra.recovery.accounting import AttemptTimes, attempt_times
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record
from orchestra.run.metrics_file import rows_that_count
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.run_lineage import lineage_of


@dataclass(frozen=True)
class Spending:
    """Sums over all attempts so far. None: not known, and the field beside it says why.

    `gpu_hours` are those that the run held, its starts, restarts and all nodes of its jobs included, the
    queue not; `idle_gpu_hours` are those among them of nodes that stood by or that a smaller layout left out.
    `joules` are those up to the last row of each attempt, of steps that were trained again too;
    `joules_per_token` divides them by the tokens that count.
    """

    gpu_hours: float | None = None
    idle_gpu_hours: float | None = None
    no_gpu_hours: str | None = None
    cost: float | None = None
    currency: str | None = None
    no_cost: str | None = None
    joules: float | None = None
    joules_per_token: float | None = None
    no_energy: str | None = None

    def to_json(self) -> Record:
        """Return all fields."""
        return dataclasses.asdict(self)


def spending(
    events: Sequence[Record],
    all_rows: Sequence[Record],
    tokens: int | None,
    config: Config | None,
    now: float | None,
) -> Spending:
    """Sum what a run used up to `now`, or to its end (None). `tokens`: those that count."""
    hours, idle_hours, no_hours = _gpu_hours(events, attempt_times(events, all_rows), config, now)
    joules, no_energy = _joules(events, all_rows)
    price = None if config is None else config.cluster.price_per_gpu_hour
    no_cost = "cluster.price_per_gpu_hour is not set" if price is None else no_hours
    return Spending(
        gpu_hours=hours,
        idle_gpu_hours=idle_hours,
        no_gpu_hours=no_hours,
        cost=None if price is None or hours is None else price * hours,
        currency=None if config is None else config.cluster.currency,
        no_cost=no_cost,
        joules=joules,
        joules_per_token=joules / tokens if joules is not None and tokens else None,
        no_energy=no_energy,
    )


def read_spending(
    run: RunDir, events: Sequence[Record], rows: Sequence[Record], state: RunPhase, now: float
) -> Spending:
    """Read the configuration of a run in `state`, and sum what it used up to `now`; `rows` are all it has."""
    counting = rows_that_count(rows, lineage_of(events))
    tokens = [row["tokens"] for row in counting[-1:] if is_whole(row.get("tokens"))]
    try:
        config = read_config(run.config)
    except ConfigError:
        config = None
    return spending(events, rows, tokens[0] if tokens else None, config, held_until(state, now))


def held_until(state: RunPhase, now: float) -> float | None:
    """Return until when the newest attempt of a run in `state` held its GPUs; None: not beyond its last word.

    One that left no verdict and was followed by a wait in the queue holds nothing meanwhile.
    """
    return now if state is RunPhase.running else None


def _joules(events: Iterable[Record], rows: Iterable[Record]) -> tuple[float | None, str | None]:
    rows = list(rows)
    known = [row["energy_j"] for row in rows if is_number(row.get("energy_j"))]
    if known and any("energy_j" not in row for row in rows):
        return None, "steps of an older version did not measure it"
    causes = [str(event.get("cause")) for event in events if event["event"] == "energy_unmeasured"]
    if known and not causes:
        return sum(known), None
    if causes:
        # A sum that lacks a part would be read as the whole.
        return None, causes[-1]
    return None, "no row tells it: too short, or of an older version"


def _gpu_hours(
    events: Sequence[Record], times: Sequence[AttemptTimes], config: Config | None, now: float | None
) -> tuple[float | None, float | None, str | None]:
    """Return the hours that were held and those of them that were idle, else why they are not known."""
    devices = {str(event.get("device")) for event in events if event["event"] == "training_started"}
    if devices == {"cpu"} or (not devices and config is not None and config.cluster.device is Device.cpu):
        return None, None, "its ranks are on CPUs"
    held_s = idle_s = 0.0
    for index, attempt in enumerate(times):
        following = times[index + 1] if index + 1 < len(times) else None
        gpus_per_node = _gpus_per_node(attempt)
        if gpus_per_node is None:
            return None, None, f"attempt {attempt.attempt.number} does not say how many ranks it had"
        end = attempt.end
        if following is not None and following.is_same_start(attempt):
            end = following.started
        elif following is None and now is not None and attempt.ended is None:
            end = now
        idle = gpus_per_node * _idle_node_s(attempt, times[:index], config, end)
        held_s += gpus_per_node * attempt.attempt.start["nodes"] * max(0.0, end - attempt.started) + idle
        idle_s += idle
    return held_s / 3600.0, idle_s / 3600.0, None


def _gpus_per_node(attempt: AttemptTimes) -> float | None:
    """Return the GPUs of each node that an attempt trains on; None where it does not say its ranks."""
    nodes, ranks = (attempt.attempt.start.get(key) for key in ("nodes", "ranks_per_node"))
    if not is_whole(nodes) or not is_whole(ranks):
        return None
    shared = attempt.attempt.named("devices_shared")
    per_gpu = shared[-1].get("ranks") if shared else 1
    members = (attempt.attempt.training_started or {}).get("members_on_device")
    gpus_per_node = ranks / (per_gpu if is_whole(per_gpu) and per_gpu else 1)
    # Members of a sweep that share a GPU have a part of it each.
    return gpus_per_node / (members if is_whole(members) and members else 1)


def _idle_node_s(
    attempt: AttemptTimes, before: Sequence[AttemptTimes], config: Config | None, end: float
) -> float:
    """Return the node-seconds in which an attempt's jobs had nodes that it did not train on, up to `end`."""
    nodes, held = (attempt.attempt.start.get(key) for key in ("nodes", "nodes_held"))
    assert nodes is not None
    if not is_whole(held):
        # Of an older version: what the configuration says.
        held = nodes + (0 if config is None or attempt.job is None else config.cluster.spare_nodes)
        of_job = [each for each in before if each.is_same_start(attempt)]
        held -= sum(len(each.attempt.named("node_replaced")) for each in of_job)
    idle_node_s, since = 0.0, attempt.started
    # Nodes of a job that helps it come while it trains, and had been held since that job began.
    for event in attempt.attempt.named("nodes_held"):
        if not is_whole(event.get("nodes")):
            continue
        until = min(end, max(since, float(event["time"])))
        idle_node_s += max(0, held - nodes) * max(0.0, until - since)
        idle_node_s += event["before_s"] if is_number(event.get("before_s")) else 0.0
        since, held = until, event["nodes"]
    return float(idle_node_s + max(0, held - nodes) * max(0.0, end - since))
