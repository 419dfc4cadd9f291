"""Ranks that share a GPU: which do, and what carries their collectives. tests/gpu trains them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.schema import Config, ContextMethod, ParallelismConfig, RecoveryConfig, TrainConfig
from orchestra.errors import ConfigError
from orchestra.parallel.shared_devices import GLOO, NCCL, NcclVersion, backend_of_shared, ranks_on_device

NEW, OLD = (2, 30, 4), (2, 28, 9)


@pytest.mark.parametrize(
    ("ranks", "devices", "expected"),
    [(4, 1, [4, 4, 4, 4]), (5, 2, [3, 2, 3, 2, 3]), (3, 3, [1, 1, 1]), (2, 8, [1, 1])],
)
def test_every_rank_is_counted_on_its_own_device(ranks: int, devices: int, expected: list[int]) -> None:
    assert [ranks_on_device(rank, ranks, devices) for rank in range(ranks)] == expected


@pytest.mark.parametrize("nccl", [NEW, (2, 30, 0), (3, 0, 0)])
def test_a_new_nccl_carries_everything(nccl: NcclVersion) -> None:
    config = Config(parallelism=ParallelismConfig(tp=2), train=replace(TrainConfig(), compile=True))
    assert backend_of_shared(config, nccl) == NCCL


@pytest.mark.parametrize("nccl", [OLD, None])
def test_gloo_takes_the_place_of_an_old_nccl(nccl: NcclVersion | None) -> None:
    for tp, is_compiled in ((2, False), (1, True), (2, "auto")):
        config = Config(
            parallelism=ParallelismConfig(tp=tp), train=replace(TrainConfig(), compile=is_compiled)
        )
        assert backend_of_shared(config, nccl) == GLOO


def test_what_gloo_lacks_is_refused_with_what_to_do() -> None:
    config = Config(
        parallelism=ParallelismConfig(tp=2, cp=2, cp_method=ContextMethod.ulysses),
        train=replace(TrainConfig(), compile=True),
        recovery=RecoveryConfig(replay_every_steps=5),
    )
    with pytest.raises(ConfigError) as raised:
        backend_of_shared(config, OLD)
    remedies = ("train.compile=false", "cp_method=all_gather", "replay_every_steps=null")
    for problem, remedy in zip(raised.value.problems, remedies, strict=True):
        assert "NCCL 2.28.9" in problem
        assert remedy in problem
        assert "NCCL 2.30 or newer" in problem
