"""Fits a profile's constants to what runs measured, from their own `config.yaml` and `metrics.jsonl`.

A step time is the median over a run's rows after its first steps; a peak is the last row's. The constants
have physical meaning (see `profiles`) and few runs decide them: two sizes or more on one rank, and one run
for each thing that is to be predicted (more ranks, ZeRO-3, tensor parallelism). What no run decides keeps its
starting value and is reported as undecided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config, Device
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, threads_of
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.profiles import (
    BUSY,
    BUSY_MEMORY,
    CPU,
    OF_DEVICE,
    OF_NETWORK,
    PRODUCT,
    Constants,
    Profile,
    Residual,
    with_profile,
)
from orchestra.run.config_file import read_config
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.flops import model_flops_per_token
from orchestra.sizes.units import MIB

# Returns log(predicted ÷ measured) for each measurement.
Residuals = Callable[[Constants], Sequence[float]]

_STEP = 0.02
_ROUNDS = 25
# No constant moves further in one round than by this factor (in logarithms).
_FURTHEST = 0.7
_SETTLED = 1e-4


def fitted(residuals: Residuals, start: Constants, scale: float, pulls: Mapping[str, float]) -> Constants:
    """Return constants that minimise Σ ρ(residual) + Σ pull · log²(constant ÷ start); ρ is quadratic near 0
    and linear beyond `scale`. A constant that no measurement decides is pulled to where it starts.

    Damped Gauss-Newton in logarithms, for a handful of positive constants.
    """
    names = list(start)
    origin = [math.log(start[name]) for name in names]
    weights_of_pull = [pulls[name] for name in names]

    def at(point: Sequence[float]) -> list[float]:
        return list(residuals(dict(zip(names, map(math.exp, point), strict=True))))

    def loss(off: Sequence[float], point: Sequence[float]) -> float:
        robust = sum(2 * scale**2 * (math.sqrt(1 + (each / scale) ** 2) - 1) for each in off)
        moved = zip(weights_of_pull, point, origin, strict=True)
        return robust + sum(pull * (here - began) ** 2 for pull, here, began in moved)

    point, damping = list(origin), 1e-2
    now = at(point)
    for _ in range(_ROUNDS):
        slopes = [_slope(at, point, index, now) for index in range(len(names))]
        weights = [1 / math.sqrt(1 + (off / scale) ** 2) for off in now]
        gradient = [
            _dot3(slopes[index], weights, now) + weights_of_pull[index] * (point[index] - origin[index])
            for index in range(len(names))
        ]
        normal = [[_dot3(a, weights, b) for b in slopes] for a in slopes]
        for index, pull in enumerate(weights_of_pull):
            normal[index][index] = (normal[index][index] + pull) * (1 + damping)
        move = solved(normal, [-slope for slope in gradient])
        trial = [here + min(max(by, -_FURTHEST), _FURTHEST) for here, by in zip(point, move, strict=True)]
        then = at(trial)
        if loss(then, trial) < loss(now, point):
            is_settled = max(abs(a - b) for a, b in zip(trial, point, strict=True)) < _SETTLED
            point, now, damping = trial, then, damping / 3
            if is_settled:
                break
        else:
            damping *= 10
    return dict(zip(names, map(math.exp, point), strict=True))


def _slope(
    at: Callable[[Sequence[float]], list[float]], point: Sequence[float], index: int, now: Sequence[float]
) -> list[float]:
    shifted = [*point[:index], point[index] + _STEP, *point[index + 1 :]]
    return [(there - here) / _STEP for there, here in zip(at(shifted), now, strict=True)]


def _dot3(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    return sum(x * y * z for x, y, z in zip(a, b, c, strict=True))


def solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x with matrix · x = right, by elimination with pivots. The matrix must be regular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(column + 1, size):
            factor = rows[index][column] / rows[column][column]
            for place in range(column, size + 1):
                rows[index][place] -= factor * rows[column][place]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][place] * solution[place] for place in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution


# The first steps compile, allocate and open connections.
_FIRST_STEPS = 2
# Errors beyond these (in logarithms) count less.
_TIME_SCALE, _MEMORY_SCALE = 0.1, 0.05
# Weight of staying where it starts, in units of a run's residual; what products reach is free.
_PULL, _PULL_OF_PRODUCTS = 0.003, 1e-4
# A constant that changes no prediction by more when it is doubled was decided by nobody.
_LEAST_EFFECT = 0.02
_OF_TIME = (
    *("memory_bytes_per_s", "link_bytes_per_s", "attention_flops", "inside_latency_s"),
    *("host_layer_s", "step_s", BUSY, BUSY_MEMORY),
)
_OF_MEMORY = ("fixed_bytes", "step_share")


@dataclass(frozen=True)
class MeasuredRun:
    """What one run says: its configuration, and medians of what it measured."""

    name: str
    config: Config
    step_s: float
    peak_bytes: float
    # What the run's MFU is a share of, per rank; None where it had none.
    peak_flops: float | None

    @property
    def is_cpu(self) -> bool:
        return self.config.cluster.device is Device.cpu


def measured_run(run: RunDir, name: str = "") -> MeasuredRun:
    """Read a run, called `name` or as its directory is. Raises ConfigError where it has too few rows, or a
    configuration that was not resolved.
    """
    name = name or run.name
    config = read_config(run.config)
    rows = [row for row in read_metrics(run) if row.get("step_time_s") and row.get("memory_peak_bytes")]
    later = [row for row in rows if row["step"] > rows[0]["step"] + _FIRST_STEPS - 1]
    if not later:
        raise ConfigError(
            f"run {name}: {len(rows)} rows of metrics; expected more than {_FIRST_STEPS}, since the "
            "first steps are slower; train a few more steps with train.log_every=1"
        )
    if not isinstance(config.cluster.gpus_per_node, int):
        raise ConfigError(
            f"run {name}: cluster.gpus_per_node=auto is not resolved in its config.yaml; calibrate on "
            "runs that were given a number"
        )
    return MeasuredRun(
        name=name,
        config=config,
        step_s=statistics.median(row["step_time_s"] for row in later),
        peak_bytes=float(rows[-1]["memory_peak_bytes"]),
        peak_flops=_peak(config, later[-1]),
    )


def _peak(config: Config, row: Mapping[str, object]) -> float | None:
    """Return the peak that the run's MFU was measured against."""
    mfu, rate = row.get("mfu"), row.get("tokens_per_s_per_device")
    if not isinstance(mfu, float) or not isinstance(rate, float) or mfu <= 0:
        return None
    return model_flops_per_token(config.model, config.train.seq_len) * rate / mfu


def prediction_of(run: MeasuredRun, profile: Profile) -> Prediction:
    """Return what the planner would have said of a run with a profile."""
    return predict(
        with_profile(case_of(run.config, profile=profile), profile, threads_of(run.config, profile))
    )


def calibrated(runs: Sequence[MeasuredRun], cores: int, memory_bytes: float) -> Profile:
    """Fit a profile to runs on one kind of device. `cores` and `memory_bytes`: of a node of CPUs.

    Raises ConfigError where there are none, or where they are of several kinds.
    """
    if not runs:
        raise ConfigError("--calibrate needs at least one run; name one with metrics.jsonl")
    kinds = {CPU if run.is_cpu else run.config.cluster.hardware for run in runs}
    if len(kinds) > 1:
        devices = ", ".join(sorted(kinds))
        raise ConfigError(
            f"--calibrate: the runs are of several devices: {devices}; calibrate on one at a time"
        )
    start = _start(runs, kinds.pop(), cores, memory_bytes)
    products = [name for name in start.constants if name.startswith(PRODUCT)]
    of_time = [*products, *(name for name in _OF_TIME if name in start.constants)]
    times = _fit(
        runs, start, of_time, _TIME_SCALE, lambda prediction, run: prediction.time.total / run.step_s
    )
    profile = _fit(
        runs, times, _OF_MEMORY, _MEMORY_SCALE, lambda prediction, run: prediction.peak.total / run.peak_bytes
    )
    names = ", ".join(run.name for run in runs)
    return replace(
        profile,
        source=f"fitted on {len(runs)} run{'s' if len(runs) > 1 else ''}: {names}",
        undecided=_undecided(runs, profile),
        residuals=[
            Residual(run.name, run.step_s, prediction.time.total, run.peak_bytes, prediction.peak.total)
            for run, prediction in ((run, prediction_of(run, profile)) for run in runs)
        ],
    )


# Where the fit of a CPU begins: between what was fitted on two machines, an Intel one with AVX-512 and an AMD
# one (benchmarks/planner/cpu.py). Attention reaches this share of the fastest product.
_ATTENTION_SHARE = 0.5
_CPU_START: Constants = {
    # Memory traffic of one core.
    "memory_bytes_per_s": 8e9,
    # gloo over the loopback device, between ranks that keep all cores busy.
    "link_bytes_per_s": 1.1e9,
    "inside_latency_s": 2.0e-3,
    # Two cores of a virtual machine keep so much beside each other.
    BUSY: 0.85,
    BUSY_MEMORY: 0.65,
    # The interpreter's own time for a layer, forward and backward, and for a step.
    "host_layer_s": 1.15e-3,
    "step_s": 3.9e-3,
    # Cores that compute are busy: nothing is hidden.
    "exposed_reduction": 1.0,
    # Resident memory of a rank beside its tensors: interpreter, torch, what they load, text to train on.
    "fixed_bytes": 320.0 * MIB,
    # Of what a step adds, with gaps of the allocator and buffers of the products.
    "step_share": 1.0,
}


def starting_cpu_profile(
    peak_flops: Mapping[str, float], product_flops: Mapping[str, float], cores: int, memory_bytes: float
) -> Profile:
    """Return the profile of one node of CPUs that a fit begins with.

    FLOP/s of one core: `peak_flops` by precision, `product_flops` by the constant's name; `memory_bytes` of
    the node.
    """
    attention = _ATTENTION_SHARE * max(product_flops.values())
    return Profile(
        device=CPU,
        constants={**_CPU_START, **product_flops, "attention_flops": attention},
        peak_flops=dict(peak_flops),
        cores=cores,
        memory_bytes=memory_bytes,
        source="where a calibration begins; not fitted",
    )


def _start(runs: Sequence[MeasuredRun], kind: str, cores: int, memory_bytes: float) -> Profile:
    """Return the profile that the fit begins with."""
    peaks: dict[str, float] = {}
    products: Constants = {}
    for run in runs:
        name = run.config.precision.name.value
        peak = run.peak_flops or 0.0
        ranks = int(run.config.cluster.gpus_per_node)
        threads = run.config.cluster.threads_per_rank or max(1, cores // ranks)
        each = min(cores, ranks * threads) / ranks if kind == CPU else 1.0
        # MFU is told against a rank's threads, whether or not each of them had a core to itself.
        peaks[name] = max(peaks.get(name, 0.0), peak / (threads if kind == CPU else 1))
        tokens = run.config.train.seq_len * (run.config.train.global_batch_size or 1)
        reached = model_flops_per_token(run.config.model, run.config.train.seq_len) * tokens / run.step_s
        products[PRODUCT + name] = max(products.get(PRODUCT + name, 0.0), 1.2 * reached / ranks / each)
    peaks = {name: peak or products[PRODUCT + name] for name, peak in peaks.items()}
    if kind == CPU:
        return starting_cpu_profile(peaks, products, cores, memory_bytes)
    case = case_of(runs[0].config)
    constants = {name: getattr(case.device, name) for name in OF_DEVICE}
    constants |= {name: getattr(case.network, name) for name in OF_NETWORK}
    constants |= {name: getattr(case.framework, name) for name in ("host_layer_s", "step_s", "fixed_bytes")}
    constants["step_share"] = 1.0
    tabled = {run.config.precision.name.value: case_of(run.config).device for run in runs}
    return Profile(
        device=kind,
        constants=constants | {PRODUCT + name: device.product_flops for name, device in tabled.items()},
        peak_flops={name: device.peak_flops for name, device in tabled.items()},
    )


def _fit(
    runs: Sequence[MeasuredRun],
    profile: Profile,
    names: Sequence[str],
    scale: float,
    ratio: Callable[[Prediction, MeasuredRun], float],
) -> Profile:
    """Return the profile with the named constants fitted; `ratio` is predicted ÷ measured of a run."""
    cases = [case_of(run.config, profile=profile) for run in runs]
    threads = [threads_of(run.config, profile) for run in runs]

    def residuals(constants: Constants) -> list[float]:
        changed = replace(profile, constants=profile.constants | constants)
        return [
            math.log(ratio(predict(with_profile(case, changed, thread)), run))
            for case, thread, run in zip(cases, threads, runs, strict=True)
        ]

    start = {name: profile.constants[name] for name in names}
    pulls = {name: _PULL_OF_PRODUCTS if name.startswith(PRODUCT) else _PULL for name in names}
    return replace(profile, constants=profile.constants | fitted(residuals, start, scale, pulls))


def _undecided(runs: Sequence[MeasuredRun], profile: Profile) -> list[str]:
    """Return the constants that, doubled, change no run's time or peak by two per cent."""
    usual = [prediction_of(run, profile) for run in runs]

    def has_effect(name: str) -> bool:
        doubled = replace(profile, constants=profile.constants | {name: 2 * profile.constants[name]})
        changed = [prediction_of(run, doubled) for run in runs]
        return any(
            abs(now.time.total / was.time.total - 1) > _LEAST_EFFECT
            or abs(now.peak.total / was.peak.total - 1) > _LEAST_EFFECT
            for now, was in zip(changed, usual, strict=True)
        )

    return [name for name in profile.constants if not has_effect(name)]
