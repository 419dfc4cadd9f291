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


UNKNOWN = Hardware("unknown", source="no figures: MFU is null and the planner asks for cluster.peak_tflops")

_AMPERE = {"fp32": 19.5 * TERA, "bf16": 312 * TERA, "fp16": 312 * TERA}
_HOPPER_SXM = {"fp32": 66.9 * TERA, "bf16": 989.4 * TERA, "fp16": 989.4 * TERA, "fp8": 1978.9 * TERA}
_HOPPER_PCIE = {"fp32": 51.2 * TERA, "bf16": 756 * TERA, "fp16": 756 * TERA, "fp8": 1513 * TERA}
_HOPPER_NVL = {"fp32": 60 * TERA, "bf16": 835.5 * TERA, "fp16": 835.5 * TERA, "fp8": 1670.5 * TERA}
_BLACKWELL = {"fp32": 75 * TERA, "bf16": 2250 * TERA, "fp16": 2250 * TERA, "fp8": 4500 * TERA}

_A100_SHEET = "NVIDIA A100 datasheet 1758950-r4"
_H100_PAPER = "NVIDIA H100 architecture whitepaper v1.04, table 2"

TABLE: tuple[Hardware, ...] = (
    Hardware(
        name="a100_40",
        device_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        peak_flops=_AMPERE,
        memory_bytes=40960 * MIB,
        memory_bytes_per_s=1555e9,
        link_bytes_per_s=300e9,
        source=_A100_SHEET,
    ),
    Hardware(
        name="a100_80",
        device_names=("NVIDIA A100-SXM4-80GB",),
        peak_flops=_AMPERE,
        memory_bytes=81920 * MIB,
        memory_bytes_per_s=2039e9,
        link_bytes_per_s=300e9,
        source=_A100_SHEET,
    ),
    Hardware(
        name="a100_80_pcie",
        device_names=("NVIDIA A100 80GB PCIe",),
        peak_flops=_AMPERE,
        memory_bytes=81920 * MIB,
        memory_bytes_per_s=1935e9,
        link_bytes_per_s=300e9,
        source=_A100_SHEET + "; the link is a bridge between two cards",
    ),
    Hardware(
        name="h100",
        device_names=("NVIDIA H100 80GB HBM3",),
        peak_flops=_HOPPER_SXM,
        memory_bytes=81559 * MIB,
        memory_bytes_per_s=3352e9,
        link_bytes_per_s=450e9,
        source=_H100_PAPER + ", SXM5",
    ),
    Hardware(
        name="h100_pcie",
        device_names=("NVIDIA H100 PCIe",),
        peak_flops=_HOPPER_PCIE,
        memory_bytes=81559 * MIB,
        memory_bytes_per_s=2039e9,
        link_bytes_per_s=300e9,
        source=_H100_PAPER + ", PCIe; the link is a bridge between two cards",
    ),
    Hardware(
        name="h100_nvl",
        device_names=("NVIDIA H100 NVL",),
        peak_flops=_HOPPER_NVL,
        memory_bytes=95830 * MIB,
        memory_bytes_per_s=3938e9,
        link_bytes_per_s=300e9,
        source="NVIDIA H100 datasheet (2024), NVL, half of the figures with sparsity",
    ),
    Hardware(
        name="h200",
        device_names=("NVIDIA H200",),
        peak_flops=_HOPPER_SXM,
        memory_bytes=143771 * MIB,
        memory_bytes_per_s=4800e9,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 datasheet (2024), SXM: the H100's processor with other memory",
    ),
    Hardware(
        name="h200_nvl",
        device_names=("NVIDIA H200 NVL",),
        peak_flops=_HOPPER_NVL,
        memory_bytes=143771 * MIB,
        memory_bytes_per_s=4800e9,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 datasheet (2024), NVL, half of the figures with sparsity",
    ),
    Hardware(
        name="b200",
        device_names=("NVIDIA B200",),
        peak_flops=_BLACKWELL,
        memory_bytes=183359 * MIB,
        memory_bytes_per_s=7700e9,
        link_bytes_per_s=900e9,
        source="NVIDIA HGX B200 datasheet (2025), an eighth of the board, half of the figures with sparsity",
    ),
    Hardware(
        name="gb200",
        device_names=("NVIDIA GB200",),
        peak_flops={"fp32": 80 * TERA, "bf16": 2500 * TERA, "fp16": 2500 * TERA, "fp8": 5000 * TERA},
        memory_bytes=189471 * MIB,
        memory_bytes_per_s=8000e9,
        link_bytes_per_s=900e9,
        source="NVIDIA GB200 NVL72 datasheet (2024), a 72nd of the rack, half of the figures with sparsity",
    ),
    Hardware(
        # What torch calls a device is one of the module's two dies.
        name="mi250x",
        device_names=("AMD Instinct MI250X",),
        peak_flops={"fp32": 47.85 * TERA, "bf16": 191.5 * TERA, "fp16": 191.5 * TERA},
        memory_bytes=65536 * MIB,
        memory_bytes_per_s=1638e9,
        link_bytes_per_s=200e9,
        source="AMD Instinct MI250X datasheet (2021), half a module: one of two dies, matrix cores; half of "
        "its eight links of 50 GB/s each way",
    ),
    Hardware(
        name="mi250",
        device_names=("AMD Instinct MI250",),
        peak_flops={"fp32": 45.25 * TERA, "bf16": 181.05 * TERA, "fp16": 181.05 * TERA},
        memory_bytes=65536 * MIB,
        memory_bytes_per_s=1638e9,
        link_bytes_per_s=150e9,
        source="AMD Instinct MI250 datasheet (2021), half a module: one of two dies, matrix cores; half of "
        "its six links of 50 GB/s each way",
    ),
    Hardware(
        name="mi300x",
        device_names=("AMD Instinct MI300X",),
        peak_flops={
            "fp32": 163.4 * TERA,
            "bf16": 1307.4 * TERA,
            "fp16": 1307.4 * TERA,
            "fp8": 2614.9 * TERA,
        },
        memory_bytes=196608 * MIB,
        memory_bytes_per_s=5300e9,
        link_bytes_per_s=448e9,
        source="AMD Instinct MI300X datasheet (2023); seven links of 64 GB/s each way",
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
