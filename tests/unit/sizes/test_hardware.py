"""The table of accelerators: names as torch prints them, dense figures, and null for what nobody knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestra.sizes.hardware import TABLE, UNKNOWN, detect_gpus, num_visible, peak_flops, row


@pytest.mark.parametrize(
    ("device_name", "name", "bf16_tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40", 312),
        ("NVIDIA A100-SXM4-80GB", "a100_80", 312),
        ("NVIDIA A100 80GB PCIe", "a100_80_pcie", 312),
        ("NVIDIA A800-SXM4-80GB", "a800_80", 312),
        ("NVIDIA H100 80GB HBM3", "h100", 989.4),
        ("NVIDIA H100 PCIe", "h100_pcie", 756),
        ("NVIDIA H100 NVL", "h100_nvl", 835.5),
        ("NVIDIA H800", "h800", 989.4),
        ("NVIDIA H200", "h200", 989.4),
        ("NVIDIA GH200 480GB", "gh200", 989.4),
        ("NVIDIA GH200 120GB", "gh200", 989.4),
        ("NVIDIA GH200 144G HBM3e", "gh200_144", 989.4),
        ("NVIDIA B200", "b200", 2250),
        ("NVIDIA GB200", "gb200", 2500),
        ("NVIDIA B300 SXM6 AC", "b300", 2250),
        ("NVIDIA GB300", "gb300", 2500),
        ("AMD Instinct MI250X", "mi250x", 191.5),
        ("AMD Instinct MI250", "mi250", 181.05),
        ("AMD Instinct MI300X", "mi300x", 1307.4),
        ("AMD Instinct MI325X", "mi325x", 1307.4),
    ],
)
def test_device_names_of_torch_find_their_row(device_name: str, name: str, bf16_tflops: float) -> None:
    assert row(device_name).name == row(name).name == name
    for precision in ("bf16", "bf16_fp32_grad", "fp16"):
        assert peak_flops(device_name, precision) == pytest.approx(bf16_tflops * 1e12)


@pytest.mark.parametrize(
    ("fewer", "whole", "share"), [("h800", "h100", 8 / 18), ("a800_80", "a100_80", 8 / 12)]
)
def test_devices_with_fewer_links_have_all_else_of_the_whole_one(
    fewer: str, whole: str, share: float
) -> None:
    one, other = row(fewer), row(whole)
    assert one.link_bytes_per_s == pytest.approx(share * (other.link_bytes_per_s or 0))
    same: dict[str, Any] = {"link_bytes_per_s": 0, "name": "", "device_names": (), "source": ""}
    assert replace(one, **same) == replace(other, **same)


def test_the_h100_of_a_cloud_is_another_one_by_its_memory_alone() -> None:
    theirs, usual = row("h100_hbm2e"), row("h100")
    assert theirs.memory_bytes_per_s < usual.memory_bytes_per_s
    assert theirs.memory_bytes > usual.memory_bytes
    assert (theirs.peak_flops, theirs.link_bytes_per_s) == (usual.peak_flops, usual.link_bytes_per_s)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H20",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI210",
        "unknown",
        "",
    ],
)
def test_what_is_not_in_the_table_is_unknown_and_has_no_peak(device_name: str) -> None:
    assert row(device_name) is UNKNOWN
    assert peak_flops(device_name, "bf16") is None


def test_a_dtype_without_product_units_has_no_peak() -> None:
    assert peak_flops("a100_80", "fp8") is None
    assert peak_flops("h100", "fp8") == pytest.approx(2 * 989.4e12, rel=0.001)


def test_every_row_has_a_source_and_plausible_figures() -> None:
    names = [device for hardware in TABLE for device in (hardware.name, *hardware.device_names)]
    assert len(names) == len(set(names))
    for hardware in TABLE:
        assert hardware.source
        if hardware is UNKNOWN:
            continue
        assert 39e9 < (hardware.memory_bytes or 0) < 300e9
        assert 1e12 < (hardware.memory_bytes_per_s or 0) < 10e12
        assert hardware.link_bytes_per_s is not None
        assert hardware.peak_flops["fp32"] < hardware.peak_flops["bf16"] == hardware.peak_flops["fp16"]


@pytest.mark.parametrize(
    ("num_installed", "visible", "expected"),
    [
        (8, None, 8),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,3", 2),
        (8, "0, 3", 2),
        (8, "0,-1,3", 1),
        (2, "0,1,2", 2),
        (8, "GPU-8f1b,MIG-22aa", 2),
        (8, "NoDevFiles", 0),
        (0, "0", 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_does(
    num_installed: int, visible: str | None, expected: int
) -> None:
    assert num_visible(num_installed, visible) == expected


def test_hidden_gpus_are_not_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_gpus() == 0
