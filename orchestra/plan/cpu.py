"""What is known of CPUs without calibration: this machine's measured rates, and shares that usually hold.

`python -m orchestra.train.cpu_rates` measures products and memory once a machine and keeps the figures in the
user's cache folder, where this module reads them: the planner itself measures nothing and loads no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from orchestra.errors import ConfigError
from orchestra.plan.profiles import BUSY, BUSY_MEMORY, CPU, PRODUCT, Constants, Profile

# Between what `orchestra plan --calibrate` fits on runs on two machines, an Intel one with AVX-512 and an AMD
# one (benchmarks/planner_cpu.py): what training reaches of the fastest product, and attention of that.
_PRODUCT_SHARE, _ATTENTION_SHARE = 0.85, 0.5
# Bytes per second of one core where nobody has measured them.
_MEMORY_BYTES_PER_S = 8e9
_USUAL: Constants = {
    # gloo over the loopback device, between ranks that keep all cores busy (benchmarks/planner_cpu.py).
    "link_bytes_per_s": 1.1e9,
    "inside_latency_s": 2.0e-3,
    # Two cores of a virtual machine keep so much beside each other (cpu_rates).
    BUSY: 0.85,
    BUSY_MEMORY: 0.65,
    # The interpreter's own time for a layer, forward and backward, and for a step.
    "host_layer_s": 1.15e-3,
    "step_s": 3.9e-3,
    # Cores that compute are busy: nothing is hidden.
    "exposed_reduction": 1.0,
    # Resident memory of a rank beside its tensors: interpreter, torch, what they load, text to train on.
    "fixed_bytes": 320.0 * 2**20,
    # Of what a step adds, with gaps of the allocator and buffers of the products.
    "step_share": 1.0,
}


def usual_profile(
    peak_flops: Mapping[str, float],
    product_flops: Mapping[str, float],
    cores: int,
    memory_bytes: float,
    memory_bytes_per_s: float = _MEMORY_BYTES_PER_S,
) -> Profile:
    """Return a profile of one node from rates of one core: peaks by precision, products by name."""
    fastest = max(product_flops.values())
    constants = {
        **_USUAL,
        **product_flops,
        "memory_bytes_per_s": memory_bytes_per_s,
        "attention_flops": _ATTENTION_SHARE * fastest,
    }
    return Profile(
        device=CPU,
        constants=constants,
        peak_flops=dict(peak_flops),
        cores=cores,
        memory_bytes=memory_bytes,
        source="measured rates of this machine's CPU; shares of them from runs on two others",
    )


def rates_file() -> Path:
    """Return where the measured rates lie, by processor and precision."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "orchestra" / "cpu_rates.json"


def processor() -> str:
    """Return the processor's model and its number of cores as Linux names them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = next(
        (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "CPU"
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


# What `cpu_rates` measures.
_MEASURED = ("peak_flops", "memory_bytes_per_s", "fixed_bytes", BUSY, BUSY_MEMORY)


def is_busy() -> bool:
    """Whether more processes than there are cores wanted to run in the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def known_rates(precision: str) -> dict[str, float] | None:
    """Return what was measured here for a precision; None where nobody has, or the file is not readable."""
    try:
        found = json.loads(rates_file().read_text())[processor()][precision]
        rates = {name: float(found[name]) for name in _MEASURED}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rates if all(value > 0 for value in rates.values()) else None


def are_sure(precision: str) -> bool:
    """Whether the known rates were measured while the machine had nothing else to do."""
    try:
        return json.loads(rates_file().read_text())[processor()][precision]["is_sure"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def keep_rates(precision: str, rates: Mapping[str, float], *, is_sure: bool = True) -> None:
    """Add what was measured here to the file; a read-only home is no error, it is then measured again.

    `is_sure`: measured on a quiet machine. Others are too low, and serve until it is found quiet.
    """
    file = rates_file()
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    here = known.get(processor())
    known[processor()] = {
        **(here if isinstance(here, dict) else {}),
        precision: {**rates, "is_sure": is_sure},
    }
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(known, indent=1))
        unfinished.replace(file)


def measured_profile(precision: str) -> Profile:
    """Return a profile from this machine's measured rates. Raises ConfigError where there are none yet."""
    rates = known_rates(precision)
    if rates is None:
        raise ConfigError(
            f"cluster.device=cpu: this machine's CPU has not been measured for precision={precision}; run "
            f"orchestra plan cluster.device=cpu precision={precision} once, or give a profile with "
            "cluster.hardware=FILE.json"
        )
    peak = rates["peak_flops"]
    cores = len(os.sched_getaffinity(0))
    profile = usual_profile(
        {precision: peak},
        {PRODUCT + precision: _PRODUCT_SHARE * peak},
        cores,
        float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        rates["memory_bytes_per_s"],
    )
    profile.constants.update({name: rates[name] for name in ("fixed_bytes", BUSY, BUSY_MEMORY)})
    return profile
