"""What Slurm tells of the network, in the words of several versions, and the order of nodes that follows."""

from __future__ import annotations

import random

import pytest

from launchers.slurm.switches import Fabric, distance, num_hosts, ordered, own_path, parsed_fabric

# Slurm 22.05, as the development cluster prints it.
TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node1,node3
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node2,node[4-5]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-5] Switches=leaf[1-2]
"""
# Slurm 23.11 to 24.05, and from 24.11 on.
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gpu[001-018]
BlockName=b2 BlockIndex=1 Nodes=gpu[019-036]
"""
SIZED_BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gpu[001-018] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=gpu[019-036] BlockSize=18
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=gpu[001-036] BlockSize=36
"""


@pytest.mark.parametrize(
    ("address", "pattern", "path"),
    [
        ("spine.leaf1.node1", "switch.switch.node", ("spine", "leaf1")),
        ("b8.tux1", "block.node", ("b8",)),
        ("leaf1.node1.example.org", "switch.node", ("leaf1",)),
        # A tree of uneven depth.
        (".leaf1.node1", "switch.switch.node", ("leaf1",)),
        # No plugin.
        ("node1", "node", ()),
        ("node1.example.org", "node", ()),
        ("", "", ()),
        ("leaf1", "switch.node", ()),
    ],
)
def test_a_node_reads_its_own_switches(address: str, pattern: str, path: tuple[str, ...]) -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert own_path(environment) == path


def test_the_network_is_read_from_every_versions_words() -> None:
    assert parsed_fabric(TREE) == Fabric({"leaf1": 2, "leaf2": 3}, is_block=False)
    assert parsed_fabric(BLOCKS) == parsed_fabric(SIZED_BLOCKS) == Fabric({"b1": 18, "b2": 18}, is_block=True)
    for nothing in ("", "No topology information available\n"):
        assert parsed_fabric(nothing) is None
    known = parsed_fabric(TREE)
    assert known is not None
    assert known.words == "2 leaf switches of 2 to 3 nodes"
    assert [known.least(nodes) for nodes in (1, 3, 4)] == [1, 1, 2]
    assert num_hosts("r[1-2]n[01-04,9],login") == 11


def paths_of(*leaves: tuple[str, int]) -> dict[int, tuple[str, ...]]:
    """Nodes 0, 1, … under switches, named as `pod.leaf`, so many under each."""
    names = [name for name, count in leaves for _ in range(count)]
    return {node: tuple(name.split(".")) for node, name in enumerate(names)}


def num_leaves(block: tuple[int, ...], paths: dict[int, tuple[str, ...]]) -> int:
    return len({paths[node] for node in block})


@pytest.mark.parametrize("shuffle", range(5))
def test_a_shuffled_list_of_nodes_is_put_under_as_few_switches_as_there_are(shuffle: int) -> None:
    paths = paths_of(("s.leaf1", 4), ("s.leaf2", 4), ("s.leaf10", 4))
    nodes = list(paths)
    random.Random(shuffle).shuffle(nodes)
    order = ordered(nodes, paths)
    assert [paths[node][1] for node in order] == ["leaf1"] * 4 + ["leaf2"] * 4 + ["leaf10"] * 4
    # Within a leaf the given order stays: without a topology, or under one switch, nothing changes.
    assert [node for node in order if node < 4] == [node for node in nodes if node < 4]
    assert ordered(nodes, {}) == ordered(nodes, dict.fromkeys(nodes, ("s", "leaf1"))) == tuple(nodes)


def test_whole_blocks_lie_under_one_leaf_and_what_is_left_over_is_joined_near_by() -> None:
    odd = paths_of(("s.a", 3), ("s.b", 3), ("s.c", 2))
    order = ordered(list(odd), odd, [2])
    assert [num_leaves(order[at : at + 2], odd) for at in range(0, 8, 2)] == [1, 1, 1, 2]
    # What two leaves of a pod leave over is joined there, not over pods.
    pods = paths_of(("p1.a", 3), ("p2.b", 3), ("p1.c", 1), ("p2.d", 1))
    order = ordered(list(pods), pods, [2])
    assert all(len({pods[node][0] for node in order[at : at + 2]}) == 1 for at in range(0, 8, 2))
    # Small groups are whole inside of large ones that no leaf holds.
    nested = paths_of(("s.a", 3), ("s.b", 5))
    order = ordered(list(nested), nested, [4, 2])
    assert sorted(order) == list(nested)
    assert [num_leaves(order[at : at + 2], nested) for at in range(0, 8, 2)].count(2) == 1
    assert [num_leaves(order[at : at + 4], nested) for at in (0, 4)] == [1, 2]


def test_nodes_that_slurm_says_nothing_of_are_a_leaf_of_their_own() -> None:
    some = {0: ("s", "a"), 2: ("s", "a"), 4: ("s",)}
    assert ordered([0, 1, 2, 3, 4], some, [2]) == (1, 3, 0, 2, 4)


def test_the_distance_counts_levels_up_to_the_common_switch() -> None:
    here = ("core", "pod1", "leaf1")
    others = [here, ("core", "pod1", "leaf2"), ("core", "pod2", "leaf3"), ()]
    assert [distance(here, other) for other in others] == [0, 1, 2, 3]
