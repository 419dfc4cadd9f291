"""The figures of an accelerator that a prediction needs, from `orchestra.hardware`; nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import PrecisionName
from orchestra import hardware
from orchestra.errors import ConfigError
from orchestra.units import GIB

# Achieved share of the bf16 peak in causal flash attention, forward and backward together. FlashAttention-2
# was written for Ampere (arXiv:2307.08691) and reaches less of a later device's peak (arXiv:2407.08608). Set
# so that rows of 8,192 tokens and more meet torchtitan's and llm-foundry's tables.
_FLASH_2_ON_AMPERE = 0.50
_FLASH_2_LATER = 0.28
# Share of the peak in large matrix products. H100: fitted on the Ultra-Scale Playbook's runs, with the
# constants in frameworks.py. A100: with it llm-foundry's tables for both agree on everything else. All others
# are taken to be like H100.
_PRODUCTS_ON_AMPERE = 0.85
_PRODUCTS_LATER = 0.757


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates per second; the link is one direction of all links inside a node."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    # Achieved in large matrix products, and in causal flash attention (bf16, whatever the products are in).
    product_flops: float
    attention_flops: float


def device(name: str, precision: PrecisionName, memory_gib: float | None = None) -> Device:
    """Return a device by its row in `orchestra.hardware`. Raises ConfigError, with the names that would do,
    where a figure is missing.
    """
    row = hardware.row(name)
    peak = hardware.peak_flops(name, precision.value)
    memory = row.memory_bytes if memory_gib is None else memory_gib * GIB
    if peak is None or memory is None or row.memory_bytes_per_s is None or row.link_bytes_per_s is None:
        known = [each.name for each in hardware.TABLE if each.peak_flops]
        raise ConfigError(
            f"cluster.hardware={name}: its figures for {precision.value} are not known;"
            f" use {', '.join(known)}"
        )
    is_ampere = row.name.startswith("a100")
    attention = min(peak, row.peak_flops.get("bf16", peak))
    return Device(
        name=row.name,
        peak_flops=peak,
        memory_bytes=memory,
        memory_bytes_per_s=row.memory_bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        product_flops=peak * (_PRODUCTS_ON_AMPERE if is_ampere else _PRODUCTS_LATER),
        attention_flops=attention * (_FLASH_2_ON_AMPERE if is_ampere else _FLASH_2_LATER),
    )
