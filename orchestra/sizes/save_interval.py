"""How far apart saves should lie: what they cost against what a failure loses. Closed forms, no files.

Both planes use it: the planner before a run, rank 0 at the start of each attempt. Times are in seconds.

    Young (1974), Commun. ACM 17(9):530    τ = √(2·δ·M)
    Daly (2006), Future Gener. Comput. Syst. 22(3):303
        τ = √(2·δ·M)·(1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ   for δ < 2·M, else τ = M
        wall time ÷ work = M·exp(R/M)·(exp((τ + δ)/M) − 1) ÷ τ
    τ: work between two saves, δ: what the training waits for a save, M: mean time to failure of the whole
    run, R: from a failure to the next step (noticed, started again, restored)

They assume failures that come independently of one another at a constant rate, during restarts too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AUTO = "auto"
HOUR_S = 3600.0
# Llama 3 405B (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100.
LLAMA3_MTBF_DEVICE_HOURS = 54 * 24 * 16384 / 419
# Beyond a hundred million years failures count for nothing, and products of such times leave floating point.
_LONGEST_MTBF_HOURS = 1e12
# What a save is taken to cost where none was measured. The training waits while each rank's share is copied
# to host memory; memcpy reaches 7 to 10 GB/s (benchmarks/RESULTS.md), and a node's ranks share it.
ASSUMED_COPY_BYTES_PER_S = 5e9
# Agreements between the ranks and the bookkeeping of a save. Assumed.
ASSUMED_SAVE_S = 0.5
# Then a rank writes at this rate, two to three gigabytes a second being one disk's (benchmarks/RESULTS.md).
ASSUMED_WRITE_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class Interval:
    """A chosen number of steps between saves, and what it was made from (seconds)."""

    every_steps: int
    step_time_s: float
    stall_s: float
    mttf_s: float
    # Where the step's time comes from: predicted or measured.
    source: str

    @property
    def seconds(self) -> float:
        """The work between two saves."""
        return self.every_steps * self.step_time_s

    def to_json(self) -> dict[str, float | int | str]:
        """Return it as records keep it; a mean time to failure without an end is left out."""
        record: dict[str, float | int | str] = {"every_steps": self.every_steps, "source": self.source}
        record |= {"step_time_s": self.step_time_s, "stall_s": self.stall_s}
        return record | ({"mttf_s": self.mttf_s} if math.isfinite(self.mttf_s) else {})


def device_hours(mtbf_device_hours: float | None) -> float:
    """Return the mean time to failure of a device that predictions assume. None: as Llama 3 had it."""
    hours = LLAMA3_MTBF_DEVICE_HOURS if mtbf_device_hours is None else mtbf_device_hours
    return min(hours, _LONGEST_MTBF_HOURS)


def mttf_s(num_devices: int, mtbf_device_hours: float | None) -> float:
    """Return the mean time to failure of a run on so many devices, of which any one ends an attempt.

    `mtbf_device_hours` None: as Llama 3 had it.
    """
    return device_hours(mtbf_device_hours) * HOUR_S / num_devices


def young_s(stall_s: float, mttf: float) -> float:
    """Return Young's first-order interval."""
    return math.sqrt(2 * stall_s * mttf)


def daly_s(stall_s: float, mttf: float) -> float:
    """Return Daly's higher-order interval; the mean time to failure where a save takes twice that or more."""
    if stall_s >= 2 * mttf:
        return mttf
    ratio = stall_s / (2 * mttf)
    return young_s(stall_s, mttf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def daly_goodput(interval_s: float, stall_s: float, restart_s: float, mttf: float) -> float:
    """Return the share of the wall time that becomes work which lasts, by Daly's complete cost function."""
    exponent = (interval_s + stall_s) / mttf
    if exponent + restart_s / mttf > 700:
        # Its exponential is beyond floating point: nothing is ever finished.
        return 0.0
    return interval_s / (mttf * math.exp(restart_s / mttf) * math.expm1(exponent))


def assumed_stall_s(bytes_per_rank: float) -> float:
    """Return what the training waits for a save, where none was measured."""
    return ASSUMED_SAVE_S + bytes_per_rank / ASSUMED_COPY_BYTES_PER_S


def assumed_write_s(bytes_per_rank: float) -> float:
    """Return how long a save is written while training continues, where none was measured."""
    return bytes_per_rank / ASSUMED_WRITE_BYTES_PER_S


def chosen(
    step_time_s: float, stall_s: float, mttf: float, *, write_s: float = 0.0, source: str = "measured"
) -> Interval:
    """Return Daly's interval in whole steps: at least one, and no shorter than a save takes to be written,
    since the next one would find it busy.
    """
    seconds = max(daly_s(max(stall_s, 1e-3), mttf), write_s)
    return Interval(max(1, round(seconds / step_time_s)), step_time_s, stall_s, mttf, source)
