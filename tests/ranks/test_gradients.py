"""Bucketed, overlapped reduction against the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from conf.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.optim.adamw import make_adamw
from orchestra.parallel.apply import parallelize
from orchestra.parallel.mesh import Mesh
from orchestra.topology import Layout
from orchestra.train.step import TrainingStep

pytestmark = pytest.mark.ranks

SEQUENCE = 32


def config_of(precision: str = "fp32", bucket_mib: float = 0.05) -> Config:
    return Config(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64),
        parallelism=ParallelismConfig(bucket_mib=bucket_mib),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, clip_norm=0.5),
        train=TrainConfig(steps=20, seq_len=SEQUENCE),
    )


def mesh_of(rank: int, dp: int) -> Mesh:
    degrees = Layout(dp=dp)
    group = dist.group.WORLD if dp > 1 else None
    return Mesh(rank, degrees, degrees.coordinates(rank), torch.device("cpu"), group)


def train_steps(rank: int, dp: int, global_batch: int, micro_batch: int, steps: int, **settings: Any) -> Any:
    """Train on fixed random tokens; return each step's loss and gradient norm, and the final parameters."""
    config = config_of(**settings)
    model = Transformer(config.model)
    fill_initial_values(model, 0)
    parallelized = parallelize(model, config, mesh_of(rank, dp))
    optimizer = make_adamw(parallelized.trained, config.optim)
    training = TrainingStep(parallelized, optimizer, config, mesh_of(rank, dp), global_batch * SEQUENCE)
    history = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (global_batch, SEQUENCE + 1), generator=generator)
        micro_batches = tokens.view(-1, dp, micro_batch, SEQUENCE + 1)[:, rank]
        result = training.run(step, micro_batches)
        history.append((float(result.loss), float(result.grad_norm)))
    return history, {item.name: item.master.detach().clone() for item in parallelized.trained}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bucket_mib", [0.001, 0.05, 100.0])
def test_two_ranks_train_like_one(
    ranks: Callable[[int], RankPool], accumulation: int, bucket_mib: float
) -> None:
    batch = {"global_batch": 4 * accumulation, "micro_batch": 2, "steps": 20}
    expected, parameters = train_steps(0, dp=1, **batch)
    results = ranks(2).run(train_steps, dp=2, bucket_mib=bucket_mib, **batch)
    for history, final in results:
        for (loss, norm), (loss_expected, norm_expected) in zip(history, expected, strict=True):
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
    batch = {"global_batch": 4, "micro_batch": 2, "steps": 20}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: products are split differently over two threads
    try:
        history, parameters = train_steps(0, dp=1, **batch)
    finally:
        torch.set_num_threads(threads)
    (first, final), _ = ranks(2).run(train_steps, dp=2, **batch)
    assert first == history
    for name, value in final.items():
        assert torch.equal(value, parameters[name]), name


def test_three_ranks_train_like_one(ranks: Callable[[int], RankPool]) -> None:
    expected, _ = train_steps(0, dp=1, global_batch=6, micro_batch=2, steps=20)
    for history, _ in ranks(3).run(train_steps, dp=3, global_batch=6, micro_batch=2, steps=20):
        losses = [loss for loss, _ in history]
        assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_grad"])
def test_bf16_ranks_agree_bit_for_bit_and_follow_fp32(
    ranks: Callable[[int], RankPool], precision: str
) -> None:
    batch = {"global_batch": 8, "micro_batch": 2, "steps": 20}
    expected, _ = train_steps(0, dp=1, **batch)
    (first, parameters), (second, others) = ranks(2).run(train_steps, dp=2, precision=precision, **batch)
    assert first == second
    for name, value in parameters.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, others[name]), name
    # 8 bits of mantissa: losses of 20 steps stay within one per cent of fp32's.
    assert [loss for loss, _ in first] == pytest.approx([loss for loss, _ in expected], rel=1e-2)


def count_reductions(rank: int) -> list[int]:
    """Return how many all-reduces had started when each backward pass of an accumulated step ended."""
    config = config_of(bucket_mib=0.02)
    model = Transformer(config.model)
    fill_initial_values(model, 0)
    parallelized = parallelize(model, config, mesh_of(rank, 2))
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
            parallelized.gradients.begin(is_first=index == 0, is_last=index == 2)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            counts.append(len(started))
        parallelized.gradients.finish()
    finally:
        dist.all_reduce = reduce
    return [*counts, len(started)]


def test_only_the_last_micro_batch_reduces_and_it_does_so_inside_the_backward_pass(
    ranks: Callable[[int], RankPool],
) -> None:
    for first, second, after_last_backward, total in ranks(2).run(count_reductions):
        assert first == second == 0
        assert after_last_backward == total > 2


def poisoned_step(rank: int) -> tuple[bool, bool]:
    """Make one rank's loss non-finite; return whether this rank skipped and whether it kept its
    parameters.
    """
    config = config_of()
    model = Transformer(config.model)
    fill_initial_values(model, 0)
    parallelized = parallelize(model, config, mesh_of(rank, 2))
    optimizer = make_adamw(parallelized.trained, config.optim)
    training = TrainingStep(parallelized, optimizer, config, mesh_of(rank, 2), 4 * SEQUENCE)
    before = [item.master.detach().clone() for item in parallelized.trained]
    if rank == 1:
        with torch.no_grad():
            model.norm.weight[0] = torch.nan
            before = [item.master.detach().clone() for item in parallelized.trained]
    result = training.run(1, torch.randint(0, 64, (1, 2, SEQUENCE + 1)))
    after = [item.master.detach() for item in parallelized.trained]
    kept = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    return bool(result.was_skipped), kept


def test_a_non_finite_value_on_one_rank_skips_the_step_on_all(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(poisoned_step) == [(True, True), (True, True)]
