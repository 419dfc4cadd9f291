"""train.micro_batch_size=auto on ranks: all choose the same size, and the global batch stays what it is."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from pool import Ranks
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

# Half of it, what two ranks have, still has sizes on both sides of three.
GLOBAL_BATCH = 24
# Ranks that share a layer share its one key-value head too.
MODEL = replace(EVEN, num_hidden_layers=1, num_key_value_heads=1)


def auto(model: ModelConfig = MODEL, **parallelism: Any) -> Config:
    train = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": "auto"}
    return config_of(model, train=train, **parallelism)


def chosen(rank: int, world: int, config: Config, limits: Sequence[int]) -> tuple[int, Any]:
    """Choose with the limit of this rank; return the size and the peaks. No group is opened for it."""
    with patch.object(micro_batch, "host_limit_bytes", lambda _: limits[rank]):
        mesh = mesh_of(rank, layout(config.parallelism, world))
        before = len(dist.distributed_c10d._world.pg_names)
        choice = choose_micro_batch_size(config, mesh, RankEnvironment(rank, rank, world, world))
        assert len(dist.distributed_c10d._world.pg_names) == before
    gc.collect()
    return choice.size, choice.peak_bytes


# With the number of ranks.
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero": 0}),
    (4, {"zero": 3, "shard_degree": 2}),
    (4, {"zero": 1, "tp": 2, "sequence_parallel": True}),
    (2, {"zero": 2, "cp": 2}),
]


def test_all_ranks_take_what_fits_the_one_with_the_least_memory(ranks: Ranks) -> None:
    plenty, nothing = 1 << 40, 1
    peaks = []
    for size, case in CASES:
        largest = ranks(size).run(chosen, config=auto(**case), limits=[plenty] * size)
        dp = layout(auto(**case).parallelism, size).dp
        assert [found for found, _ in largest] == [GLOBAL_BATCH // dp] * size
        peaks.append(largest[0][1])
    first, second = sorted(peaks[0].items())[:2]
    # Between what three and four sequences need.
    each = (second[1] - first[1]) / (second[0] - first[0])
    tight = round(first[1] + each * (3.5 - first[0]))
    some = ranks(2).run(chosen, config=auto(**CASES[0][1]), limits=[plenty, tight])
    assert [size for size, _ in some] == [3, 3]
    none = ranks(4).run(chosen, config=auto(**CASES[1][1]), limits=[plenty, plenty, plenty, nothing])
    assert [size for size, _ in none] == [1, 1, 1, 1]


def test_a_run_that_computes_steps_again_counts_that_too(ranks: Ranks) -> None:
    plain = auto(zero=1)
    replays = replace(plain, recovery=replace(plain.recovery, replay_every_steps=4))
    peaks = [ranks(2).run(chosen, config=it, limits=[1 << 40] * 2)[0][1] for it in (plain, replays)]
    for size in peaks[0].keys() & peaks[1].keys():
        assert peaks[1][size] > peaks[0][size]
    # It fitted, and does no more.
    limits = [max(peak for peak in peaks[0].values() if peak is not None)] * 2
    sizes = [ranks(2).run(chosen, config=it, limits=limits)[0][0] for it in (plain, replays)]
    assert sizes[1] < sizes[0]


def test_one_rank_whose_noise_is_measured_takes_no_micro_batch_that_is_the_global_one() -> None:
    for every, size in ((None, GLOBAL_BATCH), (2, GLOBAL_BATCH // 2)):
        config = replace(auto(), train=replace(auto().train, noise_scale_every=every))
        assert chosen(0, 1, config, [1 << 40])[0] == size


def recorded(rank: int, world: int, config: Config, folder: Path) -> int:
    run = RunDir(folder)
    mesh = mesh_of(rank, layout(config.parallelism, world))
    events = EventWriter(run, f"rank-{rank}", 0, rank=rank)
    found = with_micro_batch_size(config, mesh, RankEnvironment(rank, rank, world, world), events)
    assert found == replace(
        config, train=replace(config.train, micro_batch_size=found.train.micro_batch_size)
    )
    return batch_shape(found.train, mesh.layout.dp).accumulation


def test_the_choice_is_recorded_once_and_the_global_batch_stays(ranks: Ranks, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir(parents=True)
    accumulations = ranks(3).run(recorded, config=auto(zero=1), folder=tmp_path)
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
        config = auto(replace(EVEN, num_hidden_layers=3))
        config = replace(config, train=replace(config.train, recompute=kind))
        mesh = mesh_of(0, layout(config.parallelism, 1))
        peaks[kind] = choose_micro_batch_size(config, mesh, RankEnvironment()).peak_bytes
    size = max(peaks[Recompute.none])
    assert peaks[Recompute.full][size] < peaks[Recompute.none][size]


def test_ranks_share_the_host_s_memory() -> None:
    assert 0 < micro_batch.host_limit_bytes(2) <= micro_batch.host_limit_bytes(1) * 0.6
