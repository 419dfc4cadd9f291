"""The rows of `metrics.jsonl`: loss, rates, MFU and HFU, memory, goodput, and the peak that MFU is measured
against. *Rank 0 only*; the memory is that of this process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from conf.schema import Config
from orchestra.precision.policies import policy
from orchestra.run.events import read_events
from orchestra.run.files import JsonLinesWriter, Record, read_json, write_atomically
from orchestra.run.metrics_file import MFU_CONVENTION, wall_begin
from orchestra.run.paths import RunDir
from orchestra.run.record import read_record
from orchestra.sizes import hardware
from orchestra.sizes.activations import keeps_attention, kinds_of_layers
from orchestra.sizes.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_per_token_causal,
)
from orchestra.sizes.topology import StepBatches, layout
from orchestra.train.hooks import TrainedStep
from orchestra.train.watch.bad_losses import OverflowLog
from orchestra.train.watch.callbacks import Callbacks
from orchestra.train.watch.energy import EnergyWatch
from orchestra.train.watch.tensorboard_files import TensorBoardFiles

# Sizes of the square products that are tried, up to the first that takes _PRODUCT_S. The fastest differs:
# one core of a Xeon with AMX makes 1.5 TFLOP/s in bf16 at 768 and 1.3 at 2048; two cores do best at 1536.
_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)
_PRODUCT_S = 0.03
_BUDGET_PER_SIZE_S = 0.1


@dataclass(frozen=True)
class MeterSettings:
    """What stays the same through an attempt. FLOPs are per token, forward and backward together."""

    model_flops: int | None
    model_flops_causal: int | None
    hardware_flops: int | None
    num_devices: int
    # Dense peak of one device in FLOP/s; null: unknown, and then MFU and HFU are null.
    peak_flops_per_s: float | None
    device: torch.device
    # Whose rows they are: readers drop those of an attempt that another one has replaced.
    attempt: int = 0


@dataclass(frozen=True)
class Totals:
    """What a run did so far: its begin (Unix seconds), tokens consumed, seconds in steps that count."""

    started_at: float
    tokens: int
    productive_s: float


def meter_settings(
    config: Config, num_devices: int, peak_flops_per_s: float | None, device: torch.device, attempt: int = 0
) -> MeterSettings:
    """Derive the settings of a meter from a configuration; `num_devices` is the world size."""
    model, seq_len = config.model, config.train.seq_len
    dp = layout(config.parallelism, num_devices).dp
    is_gpu = device.type == "cuda"
    kinds = kinds_of_layers(config, dp, is_gpu=is_gpu)
    # What layers that are a plug-in compute nobody knows.
    is_known = model.block is None
    is_kept = keeps_attention(model, config.parallelism.cp, is_gpu=is_gpu)
    return MeterSettings(
        model_flops=model_flops_per_token(model, seq_len) if is_known else None,
        model_flops_causal=model_flops_per_token_causal(model, seq_len) if is_known else None,
        hardware_flops=hardware_flops_per_token(model, seq_len, kinds, keeps_attention=is_kept)
        if is_known
        else None,
        num_devices=num_devices,
        peak_flops_per_s=peak_flops_per_s,
        device=device,
        attempt=attempt,
    )


def initial_totals(run: RunDir) -> Totals:
    """Return the totals of a run that begins at its first step, perhaps not in its first attempt."""
    events = read_events(run, ("submitted", "attempt_started"))
    began = wall_begin(events, read_record(run))
    return Totals(started_at=time.time() if began is None else began, tokens=0, productive_s=0.0)


class Meter:
    """Collects the times of steps and makes a row of them whenever the loop logs.

    `step_time_s` is the mean wall time of one step, the wait for its data included; `data_time_s` is that
    wait. `tokens_per_s` is the window's tokens over its step times, so that pauses between steps (such as
    checkpoints) do not count in it; they show in `goodput`: the seconds spent in steps whose result still
    counts, over all seconds since the run was submitted or first started: the queue, starts, saves and steps
    trained again included. `orchestra.recovery.accounting` divides up the others.
    """

    def __init__(self, settings: MeterSettings, past: Totals) -> None:
        self._settings = settings
        self._started_at = past.started_at
        self._tokens = past.tokens
        self._productive_s = past.productive_s
        self._window = _Window()

    def add_step(self, step_time_s: float, data_time_s: float, num_tokens: int) -> None:
        """Count one step: its wall time, the part of it that waited for data, its tokens over all ranks."""
        self._tokens += num_tokens
        self._productive_s += step_time_s
        self._window.add(step_time_s, data_time_s, num_tokens)

    def totals(self) -> Totals:
        """Return the totals up to the last step that was added."""
        return Totals(self._started_at, self._tokens, self._productive_s)

    def row(self, step: int, *, loss: float, grad_norm: float, lr: float, nonfinite_steps: int = 0) -> Record:
        """Return the row of `step` (the last one added) over the steps since the last row, and forget them.

        `loss` in nats per token, `grad_norm` before clipping, `nonfinite_steps` skipped since the run began.
        """
        window, self._window = self._window, _Window()
        now = time.time()
        tokens_per_s = _ratio(window.num_tokens, window.step_time_s)
        per_device = None if tokens_per_s is None else tokens_per_s / self._settings.num_devices
        return {
            "step": step,
            "time": now,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": self._tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": per_device,
            "mfu": self._utilization(self._settings.model_flops, per_device),
            "mfu_causal": self._utilization(self._settings.model_flops_causal, per_device),
            "hfu": self._utilization(self._settings.hardware_flops, per_device),
            "mfu_convention": None if self._settings.model_flops is None else MFU_CONVENTION,
            "step_time_s": _ratio(window.step_time_s, window.num_steps),
            "data_time_s": _ratio(window.data_time_s, window.num_steps),
            "memory_peak_bytes": memory_peak_bytes(self._settings.device),
            # Known to whoever reads the GPUs' counters.
            "energy_j": None,
            "power_w": None,
            "goodput": _ratio(self._productive_s, now - self._started_at),
            "nonfinite_steps": nonfinite_steps,
            "attempt": self._settings.attempt,
        }

    def _utilization(
        self, flops_per_token: int | None, tokens_per_s_per_device: float | None
    ) -> float | None:
        peak = self._settings.peak_flops_per_s
        if peak is None or flops_per_token is None or tokens_per_s_per_device is None:
            return None
        return flops_per_token * tokens_per_s_per_device / peak


@dataclass(frozen=True)
class MetricsLog:
    """Writes a row of `metrics.jsonl` for each logged step. *Rank 0 only*."""

    meter: Meter
    file: JsonLinesWriter
    overflows: OverflowLog
    batches: StepBatches
    callbacks: Callbacks
    # None where nothing can be read.
    energy: EnergyWatch | None = None
    tensorboard: TensorBoardFiles | None = None
    # Columns of the next row beside a row's own: held-out losses, and how experts were loaded.
    beside: dict[str, float | list[int]] = field(default_factory=dict)

    def add(
        self,
        trained: TrainedStep,
        *,
        is_logged: bool,
        num_skipped: int,
        failed_saves: int | None = None,
        elsewhere_s: float = 0.0,
    ) -> None:
        """Count a step, and write its row where it is logged; `num_skipped` steps were skipped so far, and
        the last `failed_saves` saves failed (None: there is nothing to tell of saves). `elsewhere_s` of the
        seconds since its begin were not the step's.
        """
        result = trained.result
        # Waits for the device: before the clock is read.
        loss = float(result.loss) if is_logged else math.nan
        step_time_s = time.perf_counter() - trained.began - elsewhere_s
        num_tokens = self.batches.at(trained.step).tokens_per_step
        self.meter.add_step(step_time_s, trained.data_time_s, num_tokens)
        if is_logged:
            row = self.meter.row(
                trained.step,
                loss=loss,
                grad_norm=float(result.grad_norm),
                lr=result.lr,
                nonfinite_steps=num_skipped,
            )
            saves = {} if failed_saves is None else {"failed_saves": failed_saves}
            if self.energy is not None:
                row |= self.energy.columns()
            row = {**row, **self.overflows.columns(trained.step), **saves, **self.beside}
            self.beside.clear()
            row = {**row, **self.callbacks.columns(trained.step, row)}
            # A full disk takes no row, and no training either.
            self.file.write_or_keep(row)
            if self.tensorboard is not None:
                self.tensorboard.add(row)

    def close(self) -> None:
        """Write what is left, of TensorBoard's files for two seconds at most."""
        self.file.write_kept()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def totals(self) -> Totals:
        """Return the run's totals up to the last step that was added."""
        return self.meter.totals()


@dataclass
class _Window:
    """Sums over the steps since the last row."""

    num_steps: int = 0
    step_time_s: float = 0.0
    data_time_s: float = 0.0
    num_tokens: int = 0

    def add(self, step_time_s: float, data_time_s: float, num_tokens: int) -> None:
        self.num_steps += 1
        self.step_time_s += step_time_s
        self.data_time_s += data_time_s
        self.num_tokens += num_tokens


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most memory used so far: tensors on a GPU, resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class _Peak:
    """Measured FLOP/s, and whether the machine did nothing else meanwhile."""

    flops: float
    is_sure: bool

    @staticmethod
    def read(value: object) -> _Peak | None:
        """Return the peak that an entry of the cache holds; None where it holds none."""
        if not isinstance(value, dict):
            return None
        flops, is_sure = value.get("flops"), value.get("is_sure")
        if not isinstance(flops, int | float) or flops <= 0 or not isinstance(is_sure, bool):
            return None
        return _Peak(float(flops), is_sure)


def device_peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the dense peak of one device in FLOP/s for the run's precision; None where it is unknown.

    `cluster.peak_tflops` comes first, then the table of `orchestra.sizes.hardware` (by `cluster.hardware`, or
    by the device's own name), then, on a CPU, a measurement on as many threads as torch has now: published
    figures for CPUs leave out clock, vector units and shared cores. *Any rank.*
    """
    if config.cluster.peak_tflops is not None:
        return config.cluster.peak_tflops * 1e12
    precision = config.precision.name.value
    if config.cluster.hardware != "auto":
        tabled = hardware.peak_flops(config.cluster.hardware, precision)
        if tabled is not None:
            return tabled
    if device.type == "cuda":
        return hardware.peak_flops(torch.cuda.get_device_name(device), precision)
    if device.type == "cpu":
        return measured_cpu_peak_flops(policy(config.precision).parameter, torch.get_num_threads())
    return None


def measured_cpu_peak_flops(dtype: torch.dtype, num_threads: int) -> float:
    """Return the FLOP/s of the fastest large square product in `dtype` on `num_threads` threads.

    Takes about a second the first time on a machine and then reads the cache, `orchestra/cpu_peak.json` under
    XDG_CACHE_HOME or ~/.cache. A peak that was measured beside other work is too low and is measured again
    when the machine is idle. Torch's number of threads is as before when it returns.
    """
    key = f"{cpu_name()} | {dtype} | {num_threads} threads | torch {torch.__version__}"
    read = {key: _Peak.read(value) for key, value in (read_json(_cache_file()) or {}).items()}
    # A missing, torn or unusable one is measured again.
    known = {key: peak for key, peak in read.items() if peak is not None}
    # More processes than there are cores wanted to run in the last minute.
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    if key not in known or not (known[key].is_sure or is_busy):
        known[key] = _Peak(_measure(dtype, num_threads), is_sure=not is_busy)
        _write_cache(known)
    return known[key].flops


def _measure(dtype: torch.dtype, num_threads: int) -> float:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        peak = 0.0
        for size in _SIZES:
            seconds = _fastest_product_s(size, dtype)
            peak = max(peak, 2 * size**3 / seconds)
            if seconds >= _PRODUCT_S:
                break
        return peak
    finally:
        torch.set_num_threads(threads_before)


def _fastest_product_s(size: int, dtype: torch.dtype) -> float:
    """Return the shortest time that a product of two size × size matrices took, warm-up left out."""
    # As in a linear layer: where fp16 is emulated, torch's product of two plain matrices is 7 times slower.
    left, right = torch.full((size, size), 0.5, dtype=dtype), torch.full((size, size), 0.5, dtype=dtype).t()
    product = torch.empty(size, size, dtype=dtype)
    torch.mm(left, right, out=product)
    fastest, deadline = float("inf"), time.perf_counter() + _BUDGET_PER_SIZE_S
    while (began := time.perf_counter()) < deadline:
        torch.mm(left, right, out=product)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def cpu_name() -> str:
    """Return the processor's model as Linux names it, with the instruction sets that products depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "orchestra" / "cpu_peak.json"


def _write_cache(known: Mapping[str, _Peak]) -> None:
    """Replace the cache atomically, since ranks may write together; a read-only home is no error."""
    text = json.dumps({key: asdict(peak) for key, peak in known.items()}, indent=1)
    with contextlib.suppress(OSError):
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_cache_file(), text, is_synced=False)
