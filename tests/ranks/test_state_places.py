"""Where and how the optimizer's state is kept must not show: in bf16, in host memory, and in checkpoints.

Any layout restores what any other saved, and the same one goes on with the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture_trainings import mixed
from pool import Ranks
from small_trainings import (
    EVEN,
    ODD,
    alone,
    assert_goes_on_bit_for_bit,
    assert_same_bits,
    config_of,
    joined,
    restore_and_go_on,
    save_and_go_on,
    trained_on,
)

from conf.schema import Config, ModelConfig, Offload, StateDType


def rounding(model: ModelConfig = EVEN, **parallelism: Any) -> Config:
    # Unclipped, without accumulation and on two ranks, all sums have one order, and all stages the same
    # gradients.
    optim = {"clip_norm": None, "state_dtype": StateDType.bf16}
    train = {"global_batch_size": 4, "micro_batch_size": 2}
    return config_of(model, optim=optim, train=train, **parallelism)


@pytest.mark.parametrize("model", [EVEN, ODD], ids=["even", "odd"])
def test_rounded_moments_have_the_same_bits_in_every_stage(ranks: Ranks, model: ModelConfig) -> None:
    configs = [rounding(model, zero=zero) for zero in (0, 1, 2, 3)]
    zero, *later_stages = trained_on(ranks(2), configs, steps=4)
    moments = [shard for shard in zero[0].shards if shard.name.startswith("optimizer.")]
    assert all(shard.tensor.dtype == torch.bfloat16 for shard in moments)
    for stage in later_stages:
        assert_same_bits(stage, zero)


def test_rounded_moments_of_tensor_parallel_ranks_follow_one_process(ranks: Ranks) -> None:
    config = rounding()
    expected = alone(config, steps=8)
    split = [rounding(tp=2, zero=0), rounding(tp=2, sequence_parallel=True)]
    for of_ranks in trained_on(ranks(2), split, steps=8):
        whole = joined(of_ranks)
        for name, value in joined([expected]).items():
            if name.startswith("model."):
                assert (whole[name] - value).norm() <= 1e-4 * value.norm(), name
                continue
            # The same random bits: all but numbers at the border of two roundings agree to the last bit.
            assert float((whole[name] == value).float().mean()) > 0.95, name


def test_a_checkpoint_of_rounded_moments_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    assert_goes_on_bit_for_bit(ranks(2), rounding(zero=2), tmp_path)


OFFLOADED: list[tuple[str, dict[str, Any]]] = [
    ("optimizer", {"zero": 0}),
    ("optimizer", {"zero": 1}),
    ("optimizer", {"zero": 2}),
    ("optimizer", {"zero": 3}),
    ("all", {"zero": 3}),
]


# The optimizer's state in bf16, and every stage of it: test_state_on_disk, with updates that are slow.
@pytest.mark.parametrize(("precision", "offloaded"), [("fp32", OFFLOADED), ("bf16", OFFLOADED[-1:])])
def test_state_in_host_memory_trains_with_the_same_bits(
    ranks: Ranks, precision: str, offloaded: list[tuple[str, dict[str, Any]]]
) -> None:
    """Run on CPU, where host memory is all there is: the copies there and back are the same calls."""
    train = {"global_batch_size": 4, "micro_batch_size": 1}
    kept = [config_of(ODD, precision, train=train, **stage) for _, stage in offloaded]
    moved = [
        config_of(ODD, precision, train=train, offload=Offload(where), **stage) for where, stage in offloaded
    ]
    expected = trained_on(ranks(2), kept, steps=4)
    for of_ranks, of_ranks_expected in zip(trained_on(ranks(2), moved, steps=4), expected, strict=True):
        assert_same_bits(of_ranks, of_ranks_expected)


# Stages alone, and with experts of which each rank has some: uneven ones, whole, and cut among ranks.
MIXTURES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (2, "optimizer", {"zero": 0, "ep": 2}),
    (2, "optimizer", {"zero": 3}),
    (2, "all", {"zero": 3, "ep": 2}),
    (2, "optimizer_disk", {"zero": 1, "ep": 2}),
    (4, "optimizer", {"zero": 2, "ep": 2}),
    (4, "all", {"zero": 3, "ep": 2}),
    (4, "optimizer_disk", {"zero": 3, "ep": 2}),
    (4, "optimizer_disk", {"zero": 2, "ep": 2, "tp": 2}),
)


@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), (4, "bf16")])
def test_the_state_of_experts_trains_with_the_same_bits_wherever_it_lies(
    ranks: Ranks, tmp_path: Path, world: int, precision: str
) -> None:
    cases = [(where, stage) for size, where, stage in MIXTURES if size == world]

    kept = [
        mixed(dp=world // stage.get("tp", 1), accumulation=2, precision=precision, **stage)
        for _, stage in cases
    ]
    places = [{"offload": Offload(where), "offload_dir": str(tmp_path)} for where, _ in cases]
    moved = [
        replace(config, parallelism=replace(config.parallelism, **place))
        for config, place in zip(kept, places, strict=True)
    ]
    expected = trained_on(ranks(world), kept, steps=3)
    for found, of_ranks in zip(trained_on(ranks(world), moved, steps=3), expected, strict=True):
        assert_same_bits(found, of_ranks)
    assert list(tmp_path.iterdir()) == []


# Global batch 12: 1, 2, 3 and 4 ranks can share it.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0 on 2": (2, {}),
    "zero1 on 3": (3, {"zero": 1}),
    "zero2 on 4": (4, {"zero": 2}),
    "zero3 on 2": (2, {"zero": 3}),
    "zero3 on 4": (4, {"zero": 3}),
    "hybrid on 4": (4, {"zero": 3, "shard_degree": 2}),
    "cp2 on 2": (2, {"zero": 1, "cp": 2}),
    "cp2 zero3 on 4": (4, {"zero": 3, "cp": 2}),
}


def setting(name: str, precision: str = "fp32") -> tuple[int, Config]:
    world, parallelism = LAYOUTS[name]
    # Between steps nothing is left of how many micro-batches there were: one each.
    own = 12 * parallelism.get("cp", 1) // world
    train = {"global_batch_size": 12, "micro_batch_size": own}
    return world, config_of(ODD, precision, train=train, **parallelism)


# In fp32 the lower stages: test_resume, and rounded moments above.
@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp32", "hybrid on 4"),
        *(("bf16", name) for name in ("zero1 on 3", "zero2 on 4", "zero3 on 2")),
        *(("bf16", name) for name in ("hybrid on 4", "cp2 zero3 on 4")),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, precision: str, name: str) -> None:
    world, config = setting(name, precision)
    assert_goes_on_bit_for_bit(ranks(world), config, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


# Each layout, and the one whose checkpoints it restores: on other ranks, or cut otherwise. Every way of
# cutting by every other one, without a trainer: test_restore.
SOURCES: dict[str, str] = {
    "one": "zero3 on 4",
    "zero0 on 2": "zero1 on 3",
    "zero1 on 3": "hybrid on 4",
    "zero2 on 4": "cp2 on 2",
    "zero3 on 2": "one",
    "zero3 on 4": "zero1 on 3",
    "hybrid on 4": "cp2 on 2",
    "cp2 on 2": "zero3 on 4",
    "cp2 zero3 on 4": "hybrid on 4",
}


@pytest.mark.parametrize("source", ["one", "zero1 on 3", "zero3 on 4", "hybrid on 4", "cp2 on 2"])
def test_every_layout_restores_what_others_saved(ranks: Ranks, saved: Path, source: str) -> None:
    world, config = setting(source)
    place = saved / source
    rows = ranks(world).run(save_and_go_on, config=config, place=place)[0][0]
    assert SOURCES.keys() == LAYOUTS.keys()
    for target in (target for target, its_source in SOURCES.items() if its_source == source):
        world, config = setting(target)
        topic = target.replace(" ", "-")
        found = ranks(world).run(restore_and_go_on, config=config, place=place, topic=topic)
        for new_rows, _, restored_digest, saved_again in found:
            assert saved_again == restored_digest, f"{source} → {target}"
            assert new_rows == found[0][0]
            for (loss, norm, _), (loss_expected, norm_expected, _) in zip(new_rows, rows, strict=True):
                assert loss == pytest.approx(loss_expected, rel=1e-5)
                assert norm == pytest.approx(norm_expected, rel=1e-5)
