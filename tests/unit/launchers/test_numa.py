"""Which cores each rank gets, from trees as sysfs shows them on the machines that people train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sysfs import ADDRESSES, device, processor, write, write_dgx

from launchers.numa import (
    BindingWish,
    NodeTopology,
    addresses_in,
    as_list,
    bound,
    read_topology,
)


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> NodeTopology:
    root = tmp_path_factory.mktemp("dgx")
    write_dgx(root)
    return read_topology(ADDRESSES, root)


def wish(kind: str = "auto", ranks: int = 8, threads: int | None = None, **others: bool) -> BindingWish:
    return BindingWish(kind, ranks, threads, **{"owns_cores": True, "on_gpu": True, **others})


ALL = range(224)


def test_each_gpu_gets_its_share_of_its_socket_with_both_threads_of_a_core(dgx: NodeTopology) -> None:
    binding = bound(dgx, ALL, wish())
    assert [as_list(cores) for cores in binding.cores] == [
        *("0-13,112-125", "14-27,126-139", "28-41,140-153", "42-55,154-167"),
        *("56-69,168-181", "70-83,182-195", "84-97,196-209", "98-111,210-223"),
    ]
    assert binding.threads == 28
    assert [dgx.nearest_adapter(gpu) for gpu in dgx.gpus] == [f"mlx5_{place}" for place in range(8)]
    assert [adapter.name for adapter in dgx.adapters][-2:] == ["mlx5_7", "mlx5_10"]


@pytest.mark.parametrize(
    ("asked", "allowed", "cores", "threads"),
    [
        # Cores that others use too: all of the socket's, with the threads of a share.
        (wish(owns_cores=False), ALL, ["0-55,112-167"] * 4 + ["56-111,168-223"] * 4, 28),
        (wish("exclusive", 2, owns_cores=False), ALL, ["0-27,112-139", "28-55,140-167"], 56),
        (wish(threads=14), ALL, None, 14),
        # Half a node, as Slurm gives it: the ranks' GPUs are those that CUDA_VISIBLE_DEVICES leaves.
        (wish(ranks=4), range(56), ["0-13", "14-27", "28-41", "42-55"], 14),
        # CPU ranks: a socket each, and three cut across.
        (wish(ranks=2, on_gpu=False), ALL, ["0-55,112-167", "56-111,168-223"], 112),
        (
            wish(ranks=3, on_gpu=False),
            range(112),
            ["0-36", "37-73", "74-111"],
            37,
        ),
        (wish("node", 2, on_gpu=False), ALL, ["0-55,112-167", "56-111,168-223"], 112),
    ],
)
def test_what_is_asked_for_is_cut_out_of_what_is_allowed(
    dgx: NodeTopology, asked: BindingWish, allowed: range, cores: list[str] | None, threads: int
) -> None:
    binding = bound(dgx, allowed, asked)
    assert (binding.threads, binding.reason) == (threads, "")
    if cores is not None:
        assert [as_list(each) for each in binding.cores] == cores
    taken = [core for each in binding.cores for core in each]
    assert set(taken) <= set(allowed)
    assert min(map(len, binding.cores)) >= threads
    if asked.owns_cores or asked.kind == "exclusive":
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("asked", "allowed", "reason"),
    [
        # The other socket's cores are not this job's.
        (wish(), range(56), "rank 4's GPU is on NUMA node 1, of which this job has no cores"),
        (wish(threads=29), ALL, "28 cores of its own and needs 29 (cluster.threads_per_rank)"),
        (wish(ranks=2, on_gpu=False), range(56), "all cores are of one NUMA node"),
        (wish("exclusive", 2, on_gpu=False), [7], "0 cores of its own and needs 1"),
        (wish(ranks=8), [3, 60], "0 cores of its own and needs 1"),
        (wish("node", 3, on_gpu=False), ALL, "56 cores of its own and needs 74"),
    ],
)
def test_nobody_is_bound_where_somebody_would_get_too_little(
    dgx: NodeTopology, asked: BindingWish, allowed: list[int] | range, reason: str
) -> None:
    binding = bound(dgx, allowed, asked)
    assert (binding.cores, binding.threads) == ((), None)
    assert reason in binding.reason


def test_a_virtual_machine_that_hides_where_its_gpus_are_binds_nobody(tmp_path: Path) -> None:
    processor(tmp_path, ["0-47", "48-95"], threads_apart=0)
    address = "0001:00:00.0"
    device(tmp_path, f"LNXSYSTM:00/pci0001:00/{address}", -1)
    topology = read_topology([address], tmp_path)
    assert "0001:00:00.0 does not say its NUMA node" in bound(topology, range(96), wish(ranks=1)).reason
    nothing = bound(read_topology([], tmp_path), range(96), wish(ranks=1))
    assert "nvidia-smi does not tell" in nothing.reason


def test_a_machine_without_numa_in_sysfs_has_one_node(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/online", "0-3")
    topology = read_topology(sysfs=tmp_path)
    assert topology.cores_of_numa == {0: (0, 1, 2, 3)}
    binding = bound(topology, [0, 1, 2], wish("exclusive", 2, on_gpu=False))
    assert binding.cores == ((0,), (1, 2))
    unknown = bound(read_topology(sysfs=tmp_path / "nothing"), [0, 1], wish("node", 2, on_gpu=False))
    assert unknown.reason == "sysfs does not tell which NUMA node the cores are of"


SMI = """\
0, GPU-aaaa1111-0000, 00000000:1B:00.0
1, GPU-bbbb2222-0000, 00000000:43:00.0
2, GPU-bbbb3333-0000, 0000000A:52:00.0
"""


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ("0000:1b:00.0", "0000:43:00.0", "000a:52:00.0")),
        ("2,0", ("000a:52:00.0", "0000:1b:00.0")),
        ("GPU-bbbb2", ("0000:43:00.0",)),
        # Two begin so; a slice of a GPU; none that is there.
        ("GPU-bbbb", ()),
        ("MIG-aaaa", ()),
        ("7", ()),
        ("", ()),
    ],
)
def test_the_ranks_gpus_are_those_that_are_visible(visible: str | None, addresses: tuple[str, ...]) -> None:
    assert addresses_in(SMI, visible) == addresses
    assert addresses_in("No devices were found\n", visible) == ()
