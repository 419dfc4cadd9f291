"""The measurement of the network between real ranks: which ranks talk, and what comes out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pool import Ranks

from orchestra.sizes.network import BETWEEN, EVERYWHERE, INSIDE, Link, read_measured
from orchestra.train import network_rank
from orchestra.train.network_rank import measure, scopes
from tests.support.command_line import CommandLine


def measured_as_two_nodes(rank: int, world: int) -> list[Link]:
    """Measure among four ranks as if the first two and the last two were nodes. *Collective*."""
    network_rank._SIZES_BYTES = (8, 4096)
    network_rank._BUDGET_S = 0.005
    return [measure(scope, torch.device("cpu")) for scope in scopes(2, 2)]


def test_pairs_and_all_ranks_are_measured_and_all_agree(ranks: Ranks) -> None:
    results = ranks(4).run(measured_as_two_nodes)
    assert all(links == results[0] for links in results)
    assert [(link.kind, link.num_ranks) for link in results[0]] == [
        (INSIDE, 2),
        (BETWEEN, 2),
        (BETWEEN, 2),
        (EVERYWHERE, 4),
    ]
    for link in results[0]:
        assert [sample.size_bytes for sample in link.samples] == [8, 4096]
        times = [time for sample in link.samples for time in (sample.all_reduce_s, sample.send_s)]
        assert all(time is None or 0 < time < math.inf for time in times)
        assert (link.latency_s is None) == (link.num_ranks > 2)


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_rank_0_has_a_part_in_all_scopes_and_pairs_cross_as_they_say(
    num_nodes: int, ranks_per_node: int
) -> None:
    found = scopes(num_nodes, ranks_per_node)
    assert bool(found) == (num_nodes * ranks_per_node > 1)
    for scope in found:
        taking_part = [rank for group in scope.groups for rank in group]
        assert 0 in taking_part
        assert len(set(taking_part)) == len(taking_part)
        crossed = {len({rank // ranks_per_node for rank in group}) > 1 for group in scope.groups}
        assert crossed == {scope.kind != INSIDE}


def test_command_measures_here_and_keeps_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    words = ["cluster.device=cpu", "cluster.gpus_per_node=2"]
    record = orchestra.json("bench", "network", "cluster=local", *words)
    assert (record["device"], record["backend"], record["ranks_per_node"]) == ("cpu", "gloo", 2)
    figures = read_measured(Path(record["file"]), "cpu")
    assert figures is not None
    assert 0 < (figures.intra_node_bytes_per_s or 0) < math.inf
    assert 0 < (figures.intra_node_latency_s or 0) < 1
    assert figures.inter_node_bytes_per_s is None
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    # From here on they stand where a configuration says nothing.
    config = orchestra.json("run", *words, "--dry-run")["config"]
    assert config["cluster"]["network"]["intra_node_bytes_per_s"] == figures.intra_node_bytes_per_s


@pytest.mark.parametrize(
    ("override", "advice"),
    [("cluster.gpus_per_node=1", "use 2 or more"), ("cluster.nodes=2", "this machine alone")],
)
def test_one_rank_or_absent_nodes_are_refused(override: str, advice: str, orchestra: CommandLine) -> None:
    assert advice in orchestra("bench", "network", "cluster.device=cpu", override, code=2).err
