"""The peak that MFU is measured against: the device's own figure, or on a CPU what a large product reaches.

A published figure for a CPU says little (clock, vector units and shared cores differ between machines), so
there the fastest of several large matrix products counts, measured once and kept in the user's cache folder.
An unknown GPU has no peak: MFU is then null, never a guess.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from conf.schema import Config
from orchestra import hardware
from orchestra.precision.policy import policy

# Sizes of the square products that are tried, up to the first that takes _PRODUCT_S. The fastest differs:
# one core of a Xeon with AMX makes 1.5 TFLOP/s in bf16 at 768 and 1.3 at 2048; two cores do best at 1536.
_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)
_PRODUCT_S = 0.03
_BUDGET_PER_SIZE_S = 0.1


@dataclass(frozen=True)
class _Peak:
    """A measured figure, and whether the machine had nothing else to do meanwhile."""

    flops: float
    is_sure: bool

    @staticmethod
    def read(value: object) -> _Peak | None:
        """Return what the cache says, None where it is no such thing."""
        if not isinstance(value, dict):
            return None
        flops, is_sure = value.get("flops"), value.get("is_sure")
        if not isinstance(flops, int | float) or flops <= 0 or not isinstance(is_sure, bool):
            return None
        return _Peak(float(flops), is_sure)


def device_peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the dense peak of one device in FLOP/s for the run's precision; None where nobody knows it.

    `cluster.peak_tflops` comes first, then the table of `orchestra.hardware` (by `cluster.hardware`, or by
    the device's own name), then, on a CPU, a measurement on as many threads as torch has now. *Any rank.*
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
    XDG_CACHE_HOME or ~/.cache. What was measured beside other work is too low: it serves until the machine is
    found quiet. Torch's number of threads is as before when it returns.
    """
    key = f"{_cpu_name()} | {dtype} | {num_threads} threads | torch {torch.__version__}"
    known = _read_cache()
    is_busy = _is_busy()
    if key not in known or not (known[key].is_sure or is_busy):
        known[key] = _Peak(_measure(dtype, num_threads), is_sure=not is_busy)
        _write_cache(known)
    return known[key].flops


def _is_busy() -> bool:
    """Whether more processes than there are cores wanted to run in the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


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


def _cpu_name() -> str:
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


def _read_cache() -> dict[str, _Peak]:
    """Return the measured peaks by key; what is missing, torn or not a positive number is measured again."""
    try:
        known = json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    found = {key: _Peak.read(value) for key, value in known.items()}
    return {key: peak for key, peak in found.items() if peak is not None}


def _write_cache(known: Mapping[str, _Peak]) -> None:
    """Replace the cache atomically, since ranks may write together; a read-only home is no error."""
    cache = _cache_file()
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=cache.parent, prefix=cache.name)
        with os.fdopen(descriptor, "w") as file:
            json.dump({key: asdict(peak) for key, peak in known.items()}, file, indent=1)
        Path(name).replace(cache)
