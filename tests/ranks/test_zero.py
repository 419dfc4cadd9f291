"""ZeRO 0 to 3 and hybrid sharding against one process: results, memory and bytes on the way."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, Ranks
from small_trainings import (
    EVEN,
    ODD,
    SEQUENCE,
    alone,
    assert_same_bits,
    assert_same_training,
    bytes_sent,
    config_of,
    mesh_of,
    start,
    take_steps,
    trained_by_graphs,
    trained_on,
)

from conf.schema import Config, DType, Family, ModelConfig, Recompute
from orchestra.errors import ConfigError
from orchestra.parallel.zero.buffers import SpareMemory, in_blocks, in_buckets
from orchestra.precision.policies import policy
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.paths import RunDir
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.topology import layout
from orchestra.train.build import with_compilation

# Steps where the comparison does not sharpen with more; `make equivalence` takes twenty.
FEW = 3
# Stage and shard degree, by the number of ranks.
STAGES: dict[int, list[dict[str, Any]]] = {
    2: [{"zero": 0, "bucket_mib": 0.001}, *({"zero": zero} for zero in (0, 1, 2, 3))],
    3: [{"zero": 0, "bucket_mib": 100.0}, *({"zero": zero} for zero in (0, 1, 2, 3))],
    # Sharded over all four: test_equivalence.
    4: [{"zero": zero, "shard_degree": 2} for zero in (1, 2, 3)],
}


# One micro-batch of two ranks: bit for bit below. Of two replicas: test_equivalence.
@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), (3, 1), (3, 3), (4, 3)])
def test_every_stage_trains_like_one_process(ranks: Ranks, world: int, accumulation: int) -> None:
    train = {"global_batch_size": world * accumulation, "micro_batch_size": 1}
    expected = alone(config_of(train=train), steps=FEW)
    configs = [config_of(train=train, **stage) for stage in STAGES[world]]
    for of_ranks in trained_on(ranks(world), configs, steps=FEW):
        assert_same_training(of_ranks, expected)


FAMILIES: dict[str, ModelConfig] = {
    "tied": replace(ODD, tie_word_embeddings=True, num_hidden_layers=1),
    "gpt": replace(ODD, family=Family.gpt, num_hidden_layers=2),
    "gpt tied": replace(ODD, family=Family.gpt, num_hidden_layers=3, tie_word_embeddings=True),
}


@pytest.mark.parametrize(
    ("family", "recompute"), [("tied", "full"), ("gpt", "none"), ("gpt tied", "none"), ("gpt tied", "full")]
)
def test_tied_and_biased_models_train_like_one_process(ranks: Ranks, family: str, recompute: str) -> None:
    train: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 1}
    expected = alone(config_of(FAMILIES[family], train=train), steps=FEW)
    train["recompute"] = Recompute(recompute)
    configs = [config_of(FAMILIES[family], train=train, zero=zero) for zero in (1, 2, 3)]
    for of_ranks in trained_on(ranks(3), configs, steps=FEW):
        assert_same_training(of_ranks, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_stage_combines_with_tensor_parallelism(ranks: Ranks, sequence_parallel: bool) -> None:
    # Both ranks of a layer share the one key-value head, and the second has a row of padding.
    model = replace(EVEN, num_key_value_heads=1, vocab_size=59)
    train = {"global_batch_size": 6, "micro_batch_size": 1}
    expected = alone(config_of(model, train=train), steps=FEW)
    split: dict[str, Any] = {"tp": 2, "sequence_parallel": sequence_parallel}
    configs = [config_of(model, train=train, zero=zero, **split) for zero in (0, 1, 2, 3)]
    for of_ranks in trained_on(ranks(4), configs, steps=FEW):
        assert_same_training(of_ranks, expected)


def test_compiled_blocks_train_with_the_hooks_around_them(ranks: Ranks) -> None:
    train = {"global_batch_size": 4}
    expected = alone(config_of(EVEN, train=train), steps=3)
    for zero in (1, 3):
        config = config_of(EVEN, train={**train, "compile": True}, zero=zero)
        assert_same_training(ranks(2).run(trained_by_graphs, config=config, steps=3), expected)


def refused_compilation(rank: int, world: int, folder: Path) -> str:
    """Return why a rank refuses to compile; only the second one has no compiler."""
    config = config_of(EVEN, train={"global_batch_size": 4, "compile": True})
    mesh = mesh_of(rank, layout(config.parallelism, world))
    events = EventWriter(RunDir(folder), rank_writer(0, rank), 0, rank=rank)
    without = {"CXX": "no-such-compiler"} if rank == 1 else {}
    with patch.dict(os.environ, without), pytest.raises(ConfigError) as refused:
        with_compilation(config, mesh, events)
    return str(refused.value)


def test_a_rank_without_a_compiler_is_heard_by_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(refused_compilation, folder=tmp_path)
    assert first == second
    assert "a C++ compiler not found" in first


@pytest.mark.parametrize("bucket_mib", [0.001, 1.0])
def test_every_stage_on_two_ranks_follows_the_bits_of_one_rank_with_two_micro_batches(
    ranks: Ranks, bucket_mib: float
) -> None:
    """Two numbers have one sum. Unclipped: squares of ranges are summed in another order than of wholes."""
    settings: dict[str, Any] = {"optim": {"clip_norm": None}, "train": {"global_batch_size": 4}}
    configs = [config_of(EVEN, **settings, zero=zero, bucket_mib=bucket_mib) for zero in (0, 1, 2, 3)]
    expected = alone(configs[0], steps=FEW)
    stages = trained_on(ranks(2), configs, steps=FEW)
    assert stages[0][0].rows == expected.rows
    for stage in stages:
        assert_same_bits(stage, [expected])


def count_reductions(rank: int, world: int) -> list[int]:
    """Return how many all-reduces had started when each backward pass of an accumulated step ended."""
    training, _ = start(rank, world, config_of(EVEN, train={"global_batch_size": 4}, bucket_mib=0.02))
    model, stage = training.parallelized.model, training.parallelized.stage
    tokens = torch.randint(0, 64, (2, SEQUENCE + 1))
    counts = []
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        for index in range(3):
            stage.begin(is_first=index == 0, is_last=index == 2)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            counts.append(reduce.call_count)
        stage.finish()
    return [*counts, reduce.call_count]


def test_only_the_last_micro_batch_reduces_and_it_does_so_inside_the_backward_pass(
    ranks: Ranks,
) -> None:
    for first, second, after_last_backward, total in ranks(2).run(count_reductions):
        assert first == second == 0
        assert after_last_backward == total > 2


# Gradients that are summed in their own dtype: test_equivalence.
@pytest.mark.parametrize(
    ("precision", "reduce_dtype"), [("bf16", DType.fp32), ("bf16_fp32_grad", DType.bf16)]
)
def test_16_bit_stages_stay_as_close_to_fp32_as_one_process_does(
    ranks: Ranks, precision: str, reduce_dtype: DType
) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 1}
    exact = alone(config_of(train=train), steps=FEW)
    settings: dict[str, Any] = {"precision": precision, "reduce_dtype": reduce_dtype, "train": train}
    rounded = alone(config_of(**settings), steps=FEW)
    spread = [abs(a[0] - b[0]) for a, b in zip(rounded.rows, exact.rows, strict=True)]
    # Each stage, and a hybrid: with which stages that goes is shown in 32 bits.
    stages: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1}, {"zero": 2, "shard_degree": 2}, {"zero": 3}]
    configs = [config_of(**settings, **stage) for stage in stages]
    for of_ranks in trained_on(ranks(4), configs, steps=FEW):
        assert all(of_rank.rows == of_ranks[0].rows for of_rank in of_ranks)
        assert all(shard.tensor.dtype == torch.float32 for shard in of_ranks[0].shards)
        off = [abs(a[0] - b[0]) for a, b in zip(of_ranks[0].rows, exact.rows, strict=True)]
        assert max(off) <= max(3 * max(spread), 2e-3 * exact.rows[0][0])


# What a rank keeps of everything, behind a step.

# Bytes per parameter by stage, whole on every rank and shared out: parameters, gradients, masters where they
# are others, and two moments.
FORMULAS = {
    "fp32": [(16, 0), (8, 8), (4, 12), (0, 16)],
    "bf16": [(16, 0), (4, 12), (2, 14), (0, 16)],
    "bf16_fp32_grad": [(18, 0), (6, 12), (2, 16), (0, 18)],
}
# Odd sizes, but large against the gaps of the alignment.
ODD_WIDE = replace(ODD, hidden_size=99, intermediate_size=201, num_hidden_layers=5, head_dim=34)


@dataclass(frozen=True)
class Kept:
    """Bytes that one rank keeps: the state, the buffers that gradients and messages pass through, and those
    that parameters are gathered into. `largest_unit`: elements.
    """

    state: int
    passing: int
    gathered: int
    num_parameters: int
    largest_unit: int


def bytes_kept(rank: int, world: int, config: Config) -> Kept:
    """Train two steps and look at all tensors of the process that were not there before."""
    gc.collect()
    # What is there already is not looked at any more.
    gc.freeze()
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, range(1, 3))
    training.parallelized.stage.settle()
    gc.collect()
    added = sum(size for size, _ in _storages(_all_of(torch.Tensor)).values())
    passing = sum(memory.num_bytes for memory in _all_of(SpareMemory))
    parameters = [item.parameter for item in training.parallelized.trained]
    is_split = config.parallelism.zero == 3
    gathered = sum(size for size, _ in _storages(parameters).values()) if is_split else 0
    return Kept(
        state=added - passing - gathered,
        passing=passing,
        gathered=gathered,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        largest_unit=max(_unit_sizes(config, parameters, training)),
    )


def _all_of(kind: type[Any]) -> list[Any]:
    return [it for it in gc.get_objects() if issubclass(type(it), kind)]


def _storages(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, torch.Tensor]]:
    """Return the size of each storage by its address; the tensors stay alive with it, so that no address
    comes back.
    """
    # What other tests of this process have compiled or counted may leave tensors without memory behind.
    real = [it for it in tensors if type(it) in (torch.Tensor, torch.nn.Parameter)]
    return {it.untyped_storage().data_ptr(): (it.untyped_storage().nbytes(), it) for it in real}


def _unit_sizes(config: Config, parameters: Sequence[torch.Tensor], training: Any) -> list[int]:
    sizes = [(item.name, item.parameter.numel()) for item in training.parallelized.trained]
    if config.parallelism.zero == 3:
        return [sum(size for _, size in group) for group in in_blocks(sizes)]
    width = policy(config.precision).gradient.itemsize
    elements = int(config.parallelism.bucket_mib * 2**20) // width
    return [sum(size for _, size in group) for group in in_buckets(sizes, elements)]


@pytest.mark.parametrize("precision", FORMULAS)
def test_each_stage_keeps_the_bytes_of_its_formula(ranks: Ranks, precision: str) -> None:
    train = {"global_batch_size": 4, "micro_batch_size": 1}
    configs = [config_of(ODD_WIDE, precision=precision, zero=zero, train=train) for zero in (0, 1, 2, 3)]
    for zero, config in enumerate(configs):
        for kept in ranks(4).run(bytes_kept, config=config):
            whole, shared_out = FORMULAS[precision][zero]
            expected = (whole + shared_out / 4) * kept.num_parameters
            assert kept.state == pytest.approx(expected, rel=0.02), f"ZeRO-{zero}"
            width = policy(config.precision).reduce.itemsize
            unit_bytes = 1.05 * kept.largest_unit * width
            # Messages of one unit; and without whole gradients one unit on its way and two that fill, since
            # autograd begins the next one before it ends the first.
            assert kept.passing <= [0, 1, 4, 4][zero] * unit_bytes, f"ZeRO-{zero}"
            # Two layers, and the larger of what stands before and behind them.
            width = policy(config.precision).parameter.itemsize
            assert kept.gathered <= 3 * 1.05 * kept.largest_unit * width


# Bytes on the way.

PLANE = ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, vocab_size=64)


def sent_by_each(pool: RankPool, configs: Sequence[Config]) -> list[dict[str, int]]:
    """Return for each configuration what a rank sends: all ranks the same."""
    results = [pool.run(bytes_sent, config=config) for config in configs]
    assert all(sent == of_ranks[0] for of_ranks in results for sent in of_ranks)
    return [of_ranks[0] for of_ranks in results]


@pytest.mark.parametrize(("world", "accumulation"), [(2, 3), (3, 1), (4, 3)])
def test_each_stage_sends_the_bytes_of_theory(ranks: Ranks, world: int, accumulation: int) -> None:
    train = {"global_batch_size": world * accumulation, "micro_batch_size": 1}
    configs = [config_of(PLANE, train=train, zero=zero) for zero in (0, 1, 2, 3)]
    num_layers, size = PLANE.num_hidden_layers, num_parameters(PLANE)
    layer = num_parameters(replace(PLANE, num_hidden_layers=num_layers + 1)) - size
    share = 4 * (world - 1) / world
    # ZeRO-3: what the two buffers of layers hold is not gathered again, neither where the backward pass turns
    # nor at the next micro-batch; and the backward passes of the ends need no parameters.
    again = num_layers - 2
    gathered = size + again * layer + (accumulation - 1) * (size - 2 * layer + again * layer)
    first, second, third, fourth = sent_by_each(ranks(world), configs)
    assert first == {"all_reduce": pytest.approx(2 * size * share, rel=0.02)}
    whole = pytest.approx(size * share, rel=0.02)
    summed = pytest.approx(accumulation * size * share, rel=0.02)
    assert second == {"reduce_scatter": whole, "all_gather": whole}
    assert third == {"reduce_scatter": summed, "all_gather": whole}
    assert fourth == {"reduce_scatter": summed, "all_gather": pytest.approx(gathered * share, rel=0.02)}
    assert sum(fourth.values()) <= 1.02 * 3 * accumulation * size * share


def test_hybrid_sharding_sends_one_sum_of_the_owned_ranges_more(ranks: Ranks) -> None:
    train = {"global_batch_size": 12, "micro_batch_size": 1}
    configs = [config_of(PLANE, train=train, zero=zero, shard_degree=2) for zero in (1, 2)]
    size = 4 * num_parameters(PLANE)
    first, second = sent_by_each(ranks(4), configs)
    half = pytest.approx(size / 2, rel=0.02)
    assert first == {"reduce_scatter": half, "all_gather": half, "all_reduce": half}
    summed = pytest.approx(3 * size / 2, rel=0.02)
    assert second == {"reduce_scatter": summed, "all_gather": half, "all_reduce": half}
