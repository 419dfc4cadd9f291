"""train.micro_batch_size=auto on ranks: all choose the same size, and the global batch stays what it is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from small_trainings import EVEN, config_of, mesh_of

from conf.schema import Config, ModelConfig, Recompute
from orchestra.parallel.mesh import RankEnvironment
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import batch_shape, divisors, layout
from orchestra.train.memory import micro_batch
from orchestra.train.memory.micro_batch import (
    choose_micro_batch_size,
    largest_that_fits,
    with_micro_batch_size,
)

Ranks = Callable[[int], RankPool]
GLOBAL_BATCH = 48
# Ranks that share a layer share its one key-value head too.
MODEL = replace(EVEN, num_hidden_layers=1, num_key_value_heads=1)


def auto(model: ModelConfig = MODEL, **parallelism: Any) -> Config:
    train = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": "auto"}
    return config_of(model, train=train, **parallelism)


def chosen(rank: int, world: int, configs: Sequence[Config], limits: Sequence[int]) -> list[tuple[int, Any]]:
    """Choose for each configuration with the limit of this rank; return sizes and peaks."""
    true_limit = micro_batch.host_limit_bytes
    groups = len(dist.distributed_c10d._world.pg_names)
    try:
        micro_batch.host_limit_bytes = lambda _: limits[rank]
        found = []
        for config in configs:
            mesh = mesh_of(rank, layout(config.parallelism, world))
            before = len(dist.distributed_c10d._world.pg_names)
            choice = choose_micro_batch_size(config, mesh, RankEnvironment(rank, rank, world, world))
            assert len(dist.distributed_c10d._world.pg_names) == before >= groups
            found.append((choice.size, choice.peak_bytes))
        gc.collect()
    finally:
        micro_batch.host_limit_bytes = true_limit
    return found


CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 3, "shard_degree": 2},
    {"zero": 1, "tp": 2, "sequence_parallel": True},
]


@pytest.mark.ranks
def test_all_ranks_take_what_fits_the_one_with_the_least_memory(ranks: Ranks) -> None:
    configs = [auto(**case) for case in CASES]
    plenty, nothing = 1 << 40, 1
    largest = ranks(4).run(chosen, world=4, configs=configs, limits=[plenty] * 4)
    for of_rank in largest:
        assert [size for size, _ in of_rank] == [
            GLOBAL_BATCH // layout(config.parallelism, 4).dp for config in configs
        ]
    first, second = sorted(largest[0][0][1].items())[:2]
    # Between what three and four sequences need.
    each = (second[1] - first[1]) / (second[0] - first[0])
    tight = round(first[1] + each * (3.5 - first[0]))
    some = ranks(4).run(chosen, world=4, configs=configs[:1], limits=[plenty, tight, plenty, plenty])
    assert [of_rank[0][0] for of_rank in some] == [3, 3, 3, 3]
    none = ranks(4).run(chosen, world=4, configs=configs[1:2], limits=[plenty, plenty, plenty, nothing])
    assert {size for of_rank in none for size, _ in of_rank} == {1}


def recorded(rank: int, world: int, config: Config, folder: Path) -> int:
    run = RunDir(folder)
    mesh = mesh_of(rank, layout(config.parallelism, world))
    events = EventWriter(run, f"rank-{rank}", 0, rank=rank)
    found = with_micro_batch_size(config, mesh, RankEnvironment(rank, rank, world, world), events)
    assert found == replace(
        config, train=replace(config.train, micro_batch_size=found.train.micro_batch_size)
    )
    return batch_shape(found.train, mesh.layout.dp).accumulation


@pytest.mark.ranks
def test_the_choice_is_recorded_once_and_the_global_batch_stays(ranks: Ranks, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir(parents=True)
    accumulations = ranks(3).run(recorded, world=3, config=auto(zero=1), folder=tmp_path)
    (event,) = [event for event in read_events(run) if event["event"] == "micro_batch_chosen"]
    assert event["size"] * event["accumulation"] * 3 == GLOBAL_BATCH
    assert set(accumulations) == {event["accumulation"]}
    assert event["limit_bytes"] > 0


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 5, 8, 12, 31, 60, 1000])
@pytest.mark.parametrize("share", [1, 2, 7, 12, 60, 4096])
def test_the_search_finds_the_largest_size_that_fits_with_few_trials(share: int, largest: int) -> None:
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= largest

    sizes = divisors(share)
    expected = max([size for size in sizes if size <= largest], default=sizes[0])
    assert largest_that_fits(sizes, fits) == expected
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * len(sizes).bit_length() + 1
    # A trial far beyond what fits is one that takes long to fail.
    assert all(
        size <= largest or sizes.index(size) <= 2 * len([s for s in sizes if s <= largest]) + 1
        for size in tried
    )


def test_recomputation_lets_a_larger_micro_batch_fit() -> None:
    peaks = {}
    for kind in Recompute:
        config = auto(replace(EVEN, num_hidden_layers=6))
        config = replace(config, train=replace(config.train, recompute=kind))
        mesh = mesh_of_one(config)
        peaks[kind] = choose_micro_batch_size(config, mesh, RankEnvironment()).peak_bytes
    size = max(peaks[Recompute.none])
    assert peaks[Recompute.full][size] < peaks[Recompute.none][size]


def mesh_of_one(config: Config) -> Any:
    return mesh_of(0, layout(config.parallelism, 1))


def test_a_container_limits_what_a_rank_may_take(tmp_path: Path) -> None:
    assert micro_batch._container_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert micro_batch._container_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("5000\n")
    assert micro_batch._container_bytes(tmp_path) == 4000
    assert 0 < micro_batch.host_limit_bytes(2) <= micro_batch.host_limit_bytes(1) * 0.6
    assert torch.get_num_threads() > 0
