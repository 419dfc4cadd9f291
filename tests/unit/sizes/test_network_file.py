"""What was measured of a network, as it is kept, read again and put into a configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from conf.schema import NetworkConfig
from orchestra.sizes.network import (
    BETWEEN,
    INSIDE,
    Link,
    Measured,
    Measurement,
    Sample,
    from_record,
    measured_file,
    read_measured,
    with_measured,
    write_measured,
)

FIGURES = {"intra_node_bytes_per_s": 4e11, "intra_node_latency_s": 1e-5}


def measured(device: str = "cuda", **figures: float) -> Measured:
    return Measured(device, "nccl", "ib0", ("node1",), 8, 1.7e9, **figures)


def test_figures_are_read_again_by_device(tmp_path: Path) -> None:
    file = tmp_path / "made" / "network" / "mine.json"
    on_gpu, on_cpu = measured(**FIGURES), measured("cpu", intra_node_bytes_per_s=1e9)
    write_measured(file, on_gpu)
    write_measured(file, on_cpu)
    assert (read_measured(file, "cuda"), read_measured(file, "cpu")) == (on_gpu, on_cpu)
    assert read_measured(file, "tpu") is None
    assert [path.name for path in file.parent.iterdir()] == ["mine.json"]


def test_a_measurement_on_one_node_keeps_what_was_measured_between_nodes(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    write_measured(file, measured(inter_node_bytes_per_s=5e10, intra_node_bytes_per_s=1.0))
    write_measured(file, measured(**FIGURES))
    assert read_measured(file, "cuda") == measured(**FIGURES, inter_node_bytes_per_s=5e10)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 9}', '{"schema": 1, "measured": {"cuda": 3}}'])
def test_a_file_that_is_something_else_is_as_good_as_none_and_is_replaced(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    assert read_measured(file, "cuda") is None
    write_measured(file, measured(**FIGURES))
    assert read_measured(file, "cuda") == measured(**FIGURES)


@pytest.mark.parametrize("value", [0, -1.0, "fast", True, float("nan"), float("inf")])
def test_neither_a_figure_that_is_no_positive_number_nor_a_key_of_a_later_version_is_taken(
    tmp_path: Path, value: object
) -> None:
    file = tmp_path / "mine.json"
    write_measured(file, measured(**FIGURES))
    record = json.loads(file.read_text())
    record["measured"]["cuda"] |= {"intra_node_bytes_per_s": value, "added_later": 1}
    file.write_text(json.dumps(record))
    assert read_measured(file, "cuda") == measured(intra_node_latency_s=1e-5)


def test_only_nulls_of_a_configuration_are_filled() -> None:
    given = NetworkConfig(interface="eth1", intra_node_bytes_per_s=7.0)
    filled = with_measured(given, measured(**FIGURES))
    assert filled == dataclasses.replace(given, intra_node_latency_s=1e-5)
    assert with_measured(given, None) == given


def test_files_lie_in_the_users_data_folder_whatever_a_cluster_is_called() -> None:
    assert measured_file({"HOME": "/me"}, "big") == Path("/me/.local/share/orchestra/network/big.json")
    named = measured_file({"HOME": "/me", "XDG_DATA_HOME": "/data"}, "../a b")
    assert named == Path("/data/orchestra/network/_a_b.json")
    assert measured_file({"HOME": "/h", "XDG_DATA_HOME": "relative"}, "big").is_relative_to("/h")


def test_bandwidth_is_that_of_all_devices_together_and_latency_that_of_one_pair() -> None:
    def link(kind: str, num_ranks: int, seconds: float, send_s: float | None) -> Link:
        samples = tuple(Sample(size, seconds, send_s) for size in (8, 1024, 1 << 20))
        return Link(kind, "some", num_ranks, samples)

    inside = (link(INSIDE, 2, 1e-3, 1e-6), link(INSIDE, 8, 2e-3, None))
    between = (link(BETWEEN, 2, 4e-3, 1e-5), link(BETWEEN, 2, 8e-3, 9e-5))
    links = (*inside, *between)
    whole = Measurement("cpu", "x86_64", "gloo", "eth0", ("a", "b"), 8, 0.0, links)
    figures = whole.figures()
    # A ring of n sends 2 (n - 1) / n of the bytes over each link.
    assert figures.intra_node_bytes_per_s == pytest.approx(2 * 7 / 8 * (1 << 20) / 2e-3)
    assert figures.inter_node_bytes_per_s == pytest.approx((1 << 20) / 8e-3)
    assert (figures.intra_node_latency_s, figures.inter_node_latency_s) == (1e-6, 1e-5)
    assert from_record(json.loads(json.dumps(dataclasses.asdict(whole)))) == whole
