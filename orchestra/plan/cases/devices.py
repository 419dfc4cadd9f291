"""The figures of an accelerator that a prediction needs, from `orchestra.hardware`; nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import PrecisionName
from orchestra import hardware
from orchestra.errors import ConfigError
from orchestra.units import GIB


@dataclass(frozen=True)
class Reached:
    """Shares of the peak that kernels reach: of the data type's in large matrix products, of the bf16 one in
    causal flash attention, forward and backward together; and where these constants come from.
    """

    products: float
    attention: float
    source: str
    # How much faster the vendor's own attention is (cuDNN's, from Hopper on).
    vendor_attention: float = 1.0


# FlashAttention-2 was written for Ampere (arXiv:2307.08691) and reaches less of a later device's peak
# (arXiv:2407.08608); attention's shares are set so that rows of 8,192 tokens and more meet torchtitan's and
# llm-foundry's tables. By the beginning of a row's name.
_REACHED = {
    "a100": Reached(0.85, 0.50, "set on llm-foundry's published A100 runs"),
    "h100": Reached(0.757, 0.28, "fitted on the Ultra-Scale Playbook's H100 runs", 1.5),
    "h200": Reached(0.757, 0.28, "the H100's; they meet torchtitan's H200 runs", 1.5),
    "b200": Reached(0.757, 0.28, "the H100's; they meet NeMo's B200 runs", 1.5),
    "gb200": Reached(0.66, 0.25, "set on published GB200 runs (DGX Cloud, Megatron Bridge)", 1.5),
    # MI250, four modules: per module 73 to 80 % of an A100's rate in llm-foundry, 1.13 times that with
    # FlashAttention-2 (databricks.com/blog/amd-mi250 and /training-llms-scale-amd-mi250-gpus, 2023): 0.55.
    # Megatron-DeepSpeed's runs on LUMI (github.com/spyysalo/lumi-llm-scaling) meet 0.45.
    "mi250": Reached(0.50, 0.30, "set between Databricks' MI250 ratios and LUMI's runs"),
    # 620 of 1,307 TFLOP/s in bf16 products, 990 of 2,615 in fp8 (SemiAnalysis, "MI300X vs H100 vs H200
    # Benchmark", December 2024). Attention: assumed to reach as many FLOP/s as on an H100.
    "mi300x": Reached(0.47, 0.21, "products measured by SemiAnalysis, attention assumed"),
}


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
    # How much faster the vendor's own attention is.
    vendor_attention: float = 1.0
    # Where peak, memory and links come from, and where the shares that are reached.
    data_sheet: str = ""
    reached: str = ""


def _has_figures(row: hardware.Hardware, precision: PrecisionName) -> bool:
    """Whether a row has every figure that a prediction in this precision needs."""
    peak = hardware.peak_flops(row.name, precision.value)
    return None not in (peak, row.memory_bytes, row.memory_bytes_per_s, row.link_bytes_per_s)


def device(name: str, precision: PrecisionName, memory_gib: float | None = None) -> Device:
    """Return a device by its row in `orchestra.hardware`. Raises ConfigError, with the names that would do,
    where a figure is missing.
    """
    row = hardware.row(name)
    peak = hardware.peak_flops(name, precision.value)
    memory = row.memory_bytes if memory_gib is None else memory_gib * GIB
    if peak is None or memory is None or row.memory_bytes_per_s is None or row.link_bytes_per_s is None:
        known = [each.name for each in hardware.TABLE if _has_figures(each, precision)]
        raise ConfigError(
            f"cluster.hardware={name}: its figures for {precision.value} are not known;"
            f" use {', '.join(known)}"
        )
    reached = _REACHED[next(name for name in _REACHED if row.name.startswith(name))]
    attention = min(peak, row.peak_flops.get("bf16", peak))
    return Device(
        name=row.name,
        peak_flops=peak,
        memory_bytes=memory,
        memory_bytes_per_s=row.memory_bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        product_flops=peak * reached.products,
        attention_flops=attention * reached.attention,
        vendor_attention=reached.vendor_attention,
        data_sheet=row.source,
        reached=reached.source,
    )
