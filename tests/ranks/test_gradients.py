"""Bucketed, overlapped reduction (ZeRO-0) against the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from small_trainings import EVEN, SEQUENCE, config_of, one_thread, start, take_steps

from conf.schema import Config, DType

pytestmark = pytest.mark.ranks

STEPS = range(1, 21)
History = list[tuple[float, float, bool]]


def setting(global_batch: int, **settings: Any) -> Config:
    train = {"global_batch_size": global_batch, "seq_len": SEQUENCE}
    return config_of(EVEN, train=train, **{"bucket_mib": 0.05, **settings})


def train_steps(rank: int, dp: int, config: Config) -> tuple[History, dict[str, torch.Tensor]]:
    """Train on fixed random tokens; return each step's loss and gradient norm, and the final parameters."""
    training, mesh = start(rank, dp, config)
    history = take_steps(config, training, mesh, STEPS)
    return history, {item.name: item.master.detach().clone() for item in training.parallelized.trained}


def alone_steps(config: Config) -> tuple[History, dict[str, torch.Tensor]]:
    with one_thread():  # as the ranks: products are split differently over two threads
        return train_steps(0, 1, config)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bucket_mib", [0.001, 0.05, 100.0])
def test_two_ranks_train_like_one(
    ranks: Callable[[int], RankPool], accumulation: int, bucket_mib: float
) -> None:
    config = setting(4 * accumulation, bucket_mib=bucket_mib)
    expected, parameters = alone_steps(config)
    results = ranks(2).run(train_steps, dp=2, config=config)
    for history, final in results:
        for (loss, norm, _), (loss_expected, norm_expected, _) in zip(history, expected, strict=True):
            assert loss == pytest.approx(loss_expected, rel=1e-6)
            assert norm == pytest.approx(norm_expected, rel=1e-5)
        for name, value in final.items():
            difference = (value - parameters[name]).norm() / parameters[name].norm()
            assert difference < 1e-5, name
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test_two_ranks_follow_the_bits_of_one_rank_with_two_micro_batches(
    ranks: Callable[[int], RankPool],
) -> None:
    config = setting(4)
    history, parameters = alone_steps(config)
    (first, final), _ = ranks(2).run(train_steps, dp=2, config=config)
    assert first == history
    for name, value in final.items():
        assert torch.equal(value, parameters[name]), name


def test_three_ranks_train_like_one(ranks: Callable[[int], RankPool]) -> None:
    config = setting(6)
    expected, _ = alone_steps(config)
    for history, _ in ranks(3).run(train_steps, dp=3, config=config):
        losses = [loss for loss, _, _ in history]
        assert losses == pytest.approx([loss for loss, _, _ in expected], rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_grad"])
@pytest.mark.parametrize("reduce_dtype", [None, DType.fp32, DType.bf16])
def test_bf16_ranks_agree_bit_for_bit_and_follow_fp32(
    ranks: Callable[[int], RankPool], precision: str, reduce_dtype: DType | None
) -> None:
    expected, _ = alone_steps(setting(8))
    config = setting(8, precision=precision, reduce_dtype=reduce_dtype)
    (first, parameters), (second, others) = ranks(2).run(train_steps, dp=2, config=config)
    assert first == second
    for name, value in parameters.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, others[name]), name
    # 8 bits of mantissa: losses of 20 steps stay within one per cent of fp32's.
    assert [row[0] for row in first] == pytest.approx([row[0] for row in expected], rel=1e-2)


def count_reductions(rank: int) -> list[int]:
    """Return how many all-reduces had started when each backward pass of an accumulated step ended."""
    training, _ = start(rank, 2, setting(4, bucket_mib=0.02))
    model, stage = training.parallelized.model, training.parallelized.stage
    started: list[int] = []
    reduce = dist.all_reduce

    def counting(*arguments: Any, **options: Any) -> Any:
        started.append(1)
        return reduce(*arguments, **options)

    tokens = torch.randint(0, 64, (2, SEQUENCE + 1))
    counts = []
    dist.all_reduce = counting
    try:
        for index in range(3):
            stage.begin(is_first=index == 0, is_last=index == 2)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            counts.append(len(started))
        stage.finish()
    finally:
        dist.all_reduce = reduce
    return [*counts, len(started)]


def test_only_the_last_micro_batch_reduces_and_it_does_so_inside_the_backward_pass(
    ranks: Callable[[int], RankPool],
) -> None:
    for first, second, after_last_backward, total in ranks(2).run(count_reductions):
        assert first == second == 0
        assert after_last_backward == total > 2


def poisoned_step(rank: int, config: Config) -> tuple[bool, bool, bool]:
    """Make one rank's loss non-finite; return whether this rank skipped the step and not the one after, and
    whether the skipped one left masters, moments and the count of updates as they were.
    """
    training, mesh = start(rank, 2, config)
    take_steps(config, training, mesh, [1])
    optimizer, trained = training.optimizer, training.parallelized.trained

    def state() -> list[torch.Tensor]:
        moments = [moment for item in trained for moment in optimizer.state[item.master].values()]
        return [it.detach().clone() for it in (*(item.master for item in trained), *moments)]

    before, updates = state(), optimizer.num_updates
    model = training.parallelized.model
    handle = model.norm.register_forward_hook(lambda _module, _inputs, out: out * (torch.nan if rank else 1))
    (poisoned,) = take_steps(config, training, mesh, [2])
    handle.remove()
    kept = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    kept = kept and optimizer.num_updates == updates
    (healthy,) = take_steps(config, training, mesh, [3])
    training.parallelized.stage.settle()
    return poisoned[2], healthy[2], kept


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_value_on_one_rank_skips_the_step_on_all(
    ranks: Callable[[int], RankPool], zero: int, precision: str
) -> None:
    config = setting(4, zero=zero, precision=precision)
    assert ranks(2).run(poisoned_step, config=config) == [(True, False, True)] * 2
