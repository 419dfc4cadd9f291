"""What layouts of real runs reached: tokens/s, MFU and peak memory beside what is predicted of them.

A run is read from its own files: the frozen configuration, the event that began its last attempt (which knows
the layout that `auto` became) and the metrics since then. The first rows are left out, in which kernels are
compiled and memory is first asked for. Runs are compared that train the same model on the same batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.predict import Prediction, predict
from orchestra.report.run_state import median_of, name_of, read_state
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import Layout, batch_shape, layout

# Rows at the beginning that do not count, where there are more than that.
_WARM_ROWS = 3


@dataclass(frozen=True)
class Workload:
    """What must be equal for layouts to be compared: model, sequence length, sequences of a step, precision;
    and the number of devices.
    """

    model: str
    seq_len: int
    global_batch_size: int
    precision: str
    num_devices: int

    @property
    def work(self) -> tuple[str, int, int, str]:
        """The same without the devices: what may run on more or fewer of them."""
        return self.model, self.seq_len, self.global_batch_size, self.precision


@dataclass(frozen=True)
class RunLayout:
    """The layout of a run, all of it resolved."""

    mesh: Layout
    zero: int
    sequence_parallel: bool
    micro_batch_size: int
    accumulation: int
    recompute: str


@dataclass(frozen=True)
class ScannedRun:
    """One run: None where it says nothing, such as `mfu` on a device without a known peak. `problem` says why
    there is no speed, `unpredicted` why there is no prediction.
    """

    name: str
    workload: Workload
    layout: RunLayout
    num_rows: int
    tokens_per_s_per_device: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    prediction: Prediction | None
    problem: str | None
    unpredicted: str | None


def read_run(run: RunDir, now: float) -> ScannedRun:
    """Read what a run's layout reached, at Unix time `now`.

    Raises ConfigError where its layout cannot be told.
    """
    config, begin = _as_it_ran(read_config(run.config), run)
    mesh = layout(config.parallelism, config.cluster.nodes * int(config.cluster.gpus_per_node))
    batch = batch_shape(config.train, mesh.dp)
    rows = [row for row in read_metrics(run) if row.get("time") is None or row["time"] >= begin]
    steady = rows[_WARM_ROWS:] or rows[-1:]
    peaks = [row["memory_peak_bytes"] for row in rows if is_number(row.get("memory_peak_bytes"))]
    prediction, unpredicted = _predicted(config)
    state = read_state(run, now)
    cause = f" ({state.cause})" if state.cause else ""
    return ScannedRun(
        name=name_of(run),
        workload=Workload(
            config.model.name,
            config.train.seq_len,
            batch.global_batch_size,
            config.precision.name.value,
            mesh.world_size,
        ),
        layout=RunLayout(
            mesh,
            config.parallelism.zero,
            config.parallelism.sequence_parallel,
            batch.micro_batch_size,
            batch.accumulation,
            config.train.recompute.value,
        ),
        num_rows=len(steady),
        tokens_per_s_per_device=median_of(steady, "tokens_per_s_per_device"),
        mfu=median_of(steady, "mfu"),
        peak_memory_bytes=max(map(int, peaks), default=None),
        prediction=prediction,
        problem=None if steady else f"no step was logged, {state.state}{cause}",
        unpredicted=unpredicted,
    )


def prediction_of(run: RunDir) -> Prediction:
    """Return what is predicted of a run's layout. Raises ConfigError where it cannot be told."""
    return predict(case_of(_as_it_ran(read_config(run.config), run)[0]))


def _as_it_ran(config: Config, run: RunDir) -> tuple[Config, float]:
    """Return the configuration with what its last attempt found for `auto`, and when that began. Raises
    ConfigError where the number of ranks is not known.
    """
    starts = [
        event
        for event in read_events(run, ("attempt_started",))
        if is_whole(event.get("ranks_per_node")) and event["ranks_per_node"] > 0
    ]
    if not starts and not isinstance(config.cluster.gpus_per_node, int):
        raise ConfigError(f"{run.path}: it never started, so that its number of ranks is not known")
    if not starts:
        return config, 0.0
    last = max(starts, key=lambda event: float(event["time"]))
    cluster = replace(config.cluster, gpus_per_node=last["ranks_per_node"])
    if is_whole(last.get("nodes")) and last["nodes"] > 0:
        cluster = replace(cluster, nodes=last["nodes"])
    train = config.train
    if is_whole(last.get("micro_batch_size")) and last["micro_batch_size"] > 0:
        train = replace(train, micro_batch_size=last["micro_batch_size"])
    return replace(config, cluster=cluster, train=train), float(last["time"])


def _predicted(config: Config) -> tuple[Prediction | None, str | None]:
    try:
        return predict(case_of(config)), None
    except ConfigError as error:
        return None, "; ".join(error.problems)


def by_workload(runs: Iterable[ScannedRun]) -> dict[Workload, list[ScannedRun]]:
    """Return the runs of each workload, the fastest first, those without a speed last."""
    workloads: dict[Workload, list[ScannedRun]] = defaultdict(list)
    for run in runs:
        workloads[run.workload].append(run)
    ordered = sorted(workloads, key=lambda workload: (*workload.work, workload.num_devices))
    return {
        workload: sorted(workloads[workload], key=lambda run: -(run.tokens_per_s_per_device or 0.0))
        for workload in ordered
    }


def best_of(workloads: Mapping[Workload, Sequence[ScannedRun]]) -> dict[Workload, ScannedRun]:
    """Return the fastest run of each workload; workloads where none ran are left out."""
    return {
        workload: runs[0]
        for workload, runs in workloads.items()
        if runs[0].tokens_per_s_per_device is not None
    }
