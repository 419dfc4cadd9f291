"""What is known of accelerators: dense peaks, memory and links, with sources; and how many this machine has.

It never guesses: a name that is not in the table, a slice of a GPU (MIG) included, has no figures. It loads
no torch and starts no driver; CPUs have no row, their peak is measured where it is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestra.sizes.units import MIB, TERA

# Which row of peaks the products of a precision policy run at. fp32 means true fp32, not TF32.
_PRODUCT_DTYPE = {"fp32": "fp32", "bf16": "bf16", "bf16_fp32_grad": "bf16", "fp16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True)
class Hardware:
    """One row of the table. None stands for unknown."""

    name: str
    # What `torch.cuda.get_device_name` says, in full.
    device_names: tuple[str, ...] = ()
    # FLOP/s without structured sparsity, by data type of the product ("with sparsity" is twice that).
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    # What nvidia-smi shows as total, which is a little less than the chips hold; AMD's: what they hold.
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    # NVLink or Infinity Fabric, one direction, all links of one GPU together.
    link_bytes_per_s: float | None = None
    source: str = ""
    # Streaming multiprocessors or compute units of what torch calls a device; Blackwell's as CUDA tells them.
    num_processors: int | None = None


UNKNOWN = Hardware(
    "unknown", source="no figures: MFU is null without cluster.peak_tflops, and the planner cannot predict"
)


def _peaks(fp32: float, half: float, fp8: float | None = None) -> dict[str, float]:
    """Return peaks that are given in TFLOP/s; bf16 and fp16 have the same."""
    eight = {} if fp8 is None else {"fp8": fp8 * TERA}
    return {"fp32": fp32 * TERA, "bf16": half * TERA, "fp16": half * TERA, **eight}


_AMPERE, _HOPPER_SXM = _peaks(19.5, 312), _peaks(66.9, 989.4, 1978.9)
_HOPPER_PCIE, _HOPPER_NVL = _peaks(51.2, 756, 1513), _peaks(60, 835.5, 1670.5)

_A100 = "NVIDIA A100 datasheet 1758950-r4"
_H100 = "NVIDIA H100 architecture whitepaper v1.04, table 2"
_HALF = "half of the figures with sparsity"
_BRIDGE = "the link is a bridge between two cards"
_GB200 = f"NVIDIA GB200 NVL72 datasheet (2024), a 72nd of the rack, {_HALF}"
_H200 = "NVIDIA H200 datasheet (2024)"
_GH200 = "NVIDIA GH200 datasheet (2024): the H100's processor with other memory"
_DIE = "half a module: one of two dies, matrix cores; half of its"

# In the order of the columns: peaks, then memory, its rate and the links' rate in bytes and per second.
TABLE: tuple[Hardware, ...] = (
    Hardware(
        "a100_40",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _AMPERE,
        40960 * MIB,
        1555e9,
        300e9,
        _A100,
        num_processors=108,
    ),
    Hardware(
        "a100_80", ("NVIDIA A100-SXM4-80GB",), _AMPERE, 81920 * MIB, 2039e9, 300e9, _A100, num_processors=108
    ),
    Hardware(
        "a100_80_pcie",
        ("NVIDIA A100 80GB PCIe",),
        _AMPERE,
        81920 * MIB,
        1935e9,
        300e9,
        f"{_A100}; {_BRIDGE}",
        num_processors=108,
    ),
    Hardware(
        *("a800_80", ("NVIDIA A800-SXM4-80GB",), _AMPERE, 81920 * MIB, 2039e9, 200e9),
        source=f"{_A100}; A800: eight links of 25 GB/s each way, of twelve",
        num_processors=108,
    ),
    Hardware(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        _HOPPER_SXM,
        81559 * MIB,
        3352e9,
        450e9,
        f"{_H100}, SXM5",
        num_processors=132,
    ),
    Hardware(
        *("h100_hbm2e", (), _HOPPER_SXM, 97_320 * MIB, 2400e9, 450e9),
        source=f"{_H100}, SXM5, with other memory: torchtitan docs/performance.md (Grand Teton)",
        num_processors=132,
    ),
    Hardware(
        "h100_pcie",
        ("NVIDIA H100 PCIe",),
        _HOPPER_PCIE,
        81559 * MIB,
        2039e9,
        300e9,
        f"{_H100}, PCIe; {_BRIDGE}",
        num_processors=114,
    ),
    Hardware(
        *("h100_nvl", ("NVIDIA H100 NVL",), _HOPPER_NVL, 95830 * MIB, 3938e9, 300e9),
        source=f"NVIDIA H100 datasheet (2024), NVL, {_HALF}",
        num_processors=132,
    ),
    Hardware(
        *("h800", ("NVIDIA H800",), _HOPPER_SXM, 81559 * MIB, 3352e9, 200e9),
        source=f"{_H100}, SXM5; H800: eight links of 25 GB/s each way, of eighteen",
        num_processors=132,
    ),
    Hardware(
        *("h200", ("NVIDIA H200",), _HOPPER_SXM, 143771 * MIB, 4800e9, 450e9),
        source=f"{_H200}, SXM: the H100's processor with other memory",
        num_processors=132,
    ),
    Hardware(
        "h200_nvl",
        ("NVIDIA H200 NVL",),
        _HOPPER_NVL,
        143771 * MIB,
        4800e9,
        450e9,
        f"{_H200}, NVL, {_HALF}",
        num_processors=132,
    ),
    # The names tell the host's memory.
    Hardware(
        *("gh200", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), _HOPPER_SXM, 97871 * MIB, 4000e9, 450e9),
        source=f"{_GH200}, HBM3",
        num_processors=132,
    ),
    Hardware(
        *("gh200_144", ("NVIDIA GH200 144G HBM3e",), _HOPPER_SXM, 145920 * MIB, 4900e9, 450e9),
        source=f"{_GH200}, HBM3e; its size as CUDA tells it",
        num_processors=132,
    ),
    Hardware(
        *("b200", ("NVIDIA B200",), _peaks(75, 2250, 4500), 183359 * MIB, 7700e9, 900e9),
        source=f"NVIDIA HGX B200 datasheet (2025), an eighth of the board, {_HALF}",
        num_processors=148,
    ),
    Hardware(
        "gb200",
        ("NVIDIA GB200",),
        _peaks(80, 2500, 5000),
        189471 * MIB,
        8000e9,
        900e9,
        _GB200,
        num_processors=148,
    ),
    Hardware(
        *("b300", ("NVIDIA B300 SXM6 AC",), _peaks(75, 2250, 4500), 275040 * MIB, 8000e9, 900e9),
        source=f"NVIDIA HGX B300 datasheet (2025), an eighth of the board, {_HALF}",
        num_processors=148,
    ),
    Hardware(
        *("gb300", ("NVIDIA GB300",), _peaks(80, 2500, 5000), 284208 * MIB, 8000e9, 900e9),
        source=f"NVIDIA GB300 NVL72 datasheet (2025), a 72nd of the rack, {_HALF}",
        num_processors=148,
    ),
    # What torch calls a device is one of the module's two dies.
    Hardware(
        *("mi250x", ("AMD Instinct MI250X",), _peaks(47.85, 191.5), 65536 * MIB, 1638e9, 200e9),
        source=f"AMD Instinct MI250X datasheet (2021), {_DIE} eight links of 50 GB/s each way",
        num_processors=110,
    ),
    Hardware(
        *("mi250", ("AMD Instinct MI250",), _peaks(45.25, 181.05), 65536 * MIB, 1638e9, 150e9),
        source=f"AMD Instinct MI250 datasheet (2021), {_DIE} six links of 50 GB/s each way",
        num_processors=104,
    ),
    Hardware(
        *("mi300x", ("AMD Instinct MI300X",), _peaks(163.4, 1307.4, 2614.9), 196608 * MIB, 5300e9, 448e9),
        source="AMD Instinct MI300X datasheet (2023); seven links of 64 GB/s each way",
        num_processors=304,
    ),
    Hardware(
        *("mi325x", ("AMD Instinct MI325X",), _peaks(163.4, 1307.4, 2614.9), 262144 * MIB, 6000e9, 448e9),
        source="AMD Instinct MI325X datasheet (2024); the MI300X's processor with other memory",
        num_processors=304,
    ),
    UNKNOWN,
)


def row(hardware_or_device_name: str) -> Hardware:
    """Return the row by its name or by torch's device name; `UNKNOWN` for any other."""
    wanted = hardware_or_device_name.strip().lower()
    for hardware in TABLE:
        if wanted == hardware.name or wanted in (name.lower() for name in hardware.device_names):
            return hardware
    return UNKNOWN


def peak_flops(hardware_or_device_name: str, precision_name: str) -> float | None:
    """Return the dense peak in FLOP/s of one device for a precision policy; None where it is unknown."""
    return row(hardware_or_device_name).peak_flops.get(_PRODUCT_DTYPE[precision_name])


def detect_gpus() -> int:
    """Return how many NVIDIA GPUs a process started here would see, without torch and without the driver.

    Counts device nodes (a container shows only its own), else the driver's list, else `nvidia-smi -L`, and
    then follows CUDA_VISIBLE_DEVICES as CUDA does.
    """
    return num_visible(_num_installed(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def num_visible(num_installed: int, visible_devices: str | None) -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves; like CUDA it stops at the first invalid entry."""
    if visible_devices is None or num_installed == 0:
        return num_installed
    count = 0
    for entry in (part.strip() for part in visible_devices.split(",")):
        is_index = entry.isdecimal() and int(entry) < num_installed
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def _num_installed() -> int:
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if nodes:
        return len(nodes)
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
