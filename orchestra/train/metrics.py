"""Turns the times of steps into the rows of `metrics.jsonl`: rates, MFU and HFU, memory, goodput.

It is arithmetic on numbers that the loop already has: it synchronises no device, reads no tensor and writes
no file. *Rank 0 only*; the memory is that of this process.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch

from conf.schema import Config
from orchestra.activations import kinds_of_layers
from orchestra.events import read_events
from orchestra.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_per_token_causal,
)
from orchestra.jsonl import Record
from orchestra.metrics_file import MFU_CONVENTION, wall_begin
from orchestra.rundir import RunDir
from orchestra.topology import layout
from orchestra.train.record import run_record


@dataclass(frozen=True)
class MeterSettings:
    """What stays the same through an attempt. FLOPs are per token, forward and backward together."""

    model_flops: int
    model_flops_causal: int
    hardware_flops: int
    num_devices: int
    # Dense peak of one device in FLOP/s; null: unknown, and then MFU and HFU are null.
    peak_flops_per_s: float | None
    device: torch.device


@dataclass(frozen=True)
class Totals:
    """What a run did so far: its begin (Unix seconds), tokens consumed, seconds in steps that count."""

    started_at: float
    tokens: int
    productive_s: float


def meter_settings(
    config: Config, num_devices: int, peak_flops_per_s: float | None, device: torch.device
) -> MeterSettings:
    """Derive the settings of a meter from a configuration; `num_devices` is the world size."""
    model, seq_len = config.model, config.train.seq_len
    dp = layout(config.parallelism, num_devices).dp
    kinds = kinds_of_layers(config, dp, is_gpu=device.type == "cuda")
    return MeterSettings(
        model_flops=model_flops_per_token(model, seq_len),
        model_flops_causal=model_flops_per_token_causal(model, seq_len),
        hardware_flops=hardware_flops_per_token(model, seq_len, kinds),
        num_devices=num_devices,
        peak_flops_per_s=peak_flops_per_s,
        device=device,
    )


def totals_of_nothing(run: RunDir) -> Totals:
    """Return the totals of a run that begins at its first step, perhaps not in its first attempt."""
    events = read_events(run, ("submitted", "attempt_started"))
    began = wall_begin(events, run_record(run))
    return Totals(started_at=time.time() if began is None else began, tokens=0, productive_s=0.0)


class Meter:
    """Collects the times of steps and makes a row of them whenever the loop logs.

    `step_time_s` is the mean wall time of one step, the wait for its data included; `data_time_s` is that
    wait. `tokens_per_s` is the window's tokens over its step times, so that pauses between steps (such as
    checkpoints) do not blur it; they show in `goodput`: the seconds spent in steps whose result still counts,
    over all seconds since the run was submitted or first started: the queue, starts, saves and steps trained
    again included. `orchestra.recovery.accounting` says where the others went.
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
            "mfu_convention": MFU_CONVENTION,
            "step_time_s": _ratio(window.step_time_s, window.num_steps),
            "data_time_s": _ratio(window.data_time_s, window.num_steps),
            "memory_peak_bytes": memory_peak_bytes(self._settings.device),
            "goodput": _ratio(self._productive_s, now - self._started_at),
            "nonfinite_steps": nonfinite_steps,
        }

    def _utilization(self, flops_per_token: int, tokens_per_s_per_device: float | None) -> float | None:
        peak = self._settings.peak_flops_per_s
        if peak is None or tokens_per_s_per_device is None:
            return None
        return flops_per_token * tokens_per_s_per_device / peak


class _Window:
    """Sums over the steps since the last row."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_time_s = 0.0
        self.data_time_s = 0.0
        self.num_tokens = 0

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
