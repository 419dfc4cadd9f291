"""What `orchestra doctor` says of GPUs, the cores beside them and network adapters, from trees like sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sysfs import ADDRESSES, device, processor, write, write_dgx

from launchers.numa import read_topology
from orchestra.doctor.check import Mark, Subject
from orchestra.doctor.hardware_checks import (
    RdmaPort,
    binding_findings,
    nccl_settings,
    network_findings,
    rdma_ports,
)


def test_the_map_names_each_gpus_node_cores_and_adapter(tmp_path: Path) -> None:
    write_dgx(tmp_path)
    *gpus, binding = binding_findings(read_topology(ADDRESSES, tmp_path), list(range(224)), Subject())
    assert [gpu.name for gpu in gpus] == [f"gpu {place}" for place in range(8)]
    assert gpus[5].found == "0000:c3:00.0, NUMA node 1, cores 56-111,168-223, adapter mlx5_5"
    assert binding.mark is Mark.ok
    assert "rank 7: 98-111,210-223" in binding.found
    off = Subject(numa_binding="none")
    *_, binding = binding_findings(read_topology(ADDRESSES, tmp_path), list(range(224)), off)
    assert (binding.mark, "off (cluster.numa_binding=none)" in binding.found) == (Mark.note, True)


def test_a_rank_that_would_float_is_warned_of(tmp_path: Path) -> None:
    processor(tmp_path, ["0-47", "48-95"], threads_apart=0)
    device(tmp_path, "pci0001:00/0001:00:00.0", -1)
    topology = read_topology(["0001:00:00.0"], tmp_path)
    gpu, binding = binding_findings(topology, list(range(96)), Subject())
    assert (gpu.mark, binding.mark) == (Mark.warning, Mark.warning)
    assert "sysfs has -1" in gpu.found
    assert "floats over these cores" in binding.advice
    # Within one NUMA node there is nowhere to float to.
    gpu, binding = binding_findings(topology, list(range(48)), Subject())
    assert binding.mark is Mark.ok


def _port(
    root: Path, name: str, layer: str, gids: dict[int, tuple[str, str]], state: str = "4: ACTIVE"
) -> None:
    port = root / "class/infiniband" / name / "ports/1"
    write(port / "link_layer", layer)
    write(port / "state", state)
    write(port / "rate", "400 Gb/sec (4X NDR)")
    for index, (kind, gid) in gids.items():
        write(port / f"gid_attrs/types/{index}", kind)
        write(port / f"gids/{index}", gid)


LINK_LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
ROUTABLE = "0000:0000:0000:0000:0000:ffff:0a00:0001"
ROCE = {
    0: ("IB/RoCE v1", LINK_LOCAL),
    1: ("RoCE v2", LINK_LOCAL),
    2: ("IB/RoCE v1", ROUTABLE),
    3: ("RoCE v2", ROUTABLE),
}


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        (
            {"mlx5_0": "InfiniBand", "mlx5_1": "InfiniBand", "mlx5_2": "Ethernet"},
            ["NCCL_IB_HCA==mlx5_0,mlx5_1"],
        ),
        ({"mlx5_0": "Ethernet", "mlx5_1": "Ethernet"}, ["NCCL_IB_HCA==mlx5_0,mlx5_1"]),
    ],
)
def test_nccl_is_told_the_adapters_that_are_fast(
    tmp_path: Path, adapters: dict[str, str], words: list[str]
) -> None:
    for name, layer in adapters.items():
        _port(tmp_path, name, layer, ROCE)
    _port(tmp_path, "mlx5_9", "InfiniBand", {}, state="1: DOWN")
    ports = rdma_ports(tmp_path)
    assert nccl_settings([port for port in ports if port.is_active]) == words
    findings = list(network_findings(ports, {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}, None))
    assert findings[-1].found == f"in cluster.setup: export {' '.join(words)}"
    assert "cluster.network.interface=eth0" in findings[1].advice
    roce = [finding.found for finding in findings if "RoCE" in finding.found]
    assert all(found.endswith("active, RoCE v2 address at GID 3") for found in roce)
    assert len(roce) == list(adapters.values()).count("Ethernet")
    assert [finding.mark for finding in findings if "mlx5_9" in finding.found] == [Mark.note]


def test_amazons_adapters_and_none_at_all() -> None:
    assert nccl_settings([RdmaPort("rdmap0", "efa", True, "")]) == ["FI_PROVIDER=efa"]
    assert nccl_settings([]) == []
    *_, last = network_findings([], {"eth0": "10.0.0.1"}, None)
    assert "NCCL uses TCP" in last.found
