"""A spike's update is left out by all ranks alike, on any layout, and only where the policy says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pool import RankPool
from small_trainings import EVEN, config_of, start, tokens_of
from test_zero_checkpoints import bits

from conf.schema import Config, LossSpikeConfig, OnSpike, RecoveryConfig
from orchestra.train.state import TensorState

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]
STEPS, WINDOW = 16, 6
TRAIN: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 3},
    {"zero": 3, "shard_degree": 2},
    {"zero": 1, "tp": 2},
    {"zero": 3, "tp": 2, "sequence_parallel": True},
]


def config(action: OnSpike, **parallelism: Any) -> Config:
    # Every loss above the median is a spike: random tokens give some of both kinds.
    spikes = LossSpikeConfig(action=action, factor=1e-9, window=WINDOW)
    base = config_of(EVEN, train=TRAIN, **parallelism)
    return replace(base, recovery=RecoveryConfig(loss_spike=spikes))


def trained_all(rank: int, world: int, configs: list[Config]) -> list[Any]:
    """Return of each training which steps were spikes, which left the state as it was, and the updates."""
    return [_trained(rank, world, each) for each in configs]


def _trained(rank: int, world: int, config: Config) -> Any:
    training, mesh = start(rank, world, config)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    spikes, unchanged = [], []
    for step in range(1, STEPS + 1):
        before = bits(state)
        result = training.step.run(step, tokens_of(config, step, mesh, training))
        assert result.is_spike is not None
        spikes.append(bool(result.is_spike))
        unchanged.append(bits(state) == before)
    training.parallelized.stage.settle()
    return spikes, unchanged, training.optimizer.num_updates


@pytest.mark.parametrize("action", [OnSpike.skip, OnSpike.roll_back, OnSpike.warn])
def test_all_ranks_leave_out_the_same_updates(action: OnSpike, ranks: Ranks) -> None:
    configs = [config(action, **each) for each in LAYOUTS]
    results = ranks(4).run(trained_all, world=4, configs=configs)
    for of_ranks in zip(*results, strict=True):
        spikes, unchanged, updates = of_ranks[0]
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
        assert not any(spikes[:WINDOW])
        assert 0 < sum(spikes) < STEPS - WINDOW
        assert unchanged == ([False] * STEPS if action is OnSpike.warn else spikes)
        assert updates == STEPS - sum(unchanged)
