"""Plug-ins on several ranks: the training of one rank, whatever each rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Ranks
from small_trainings import (
    EVEN,
    alone,
    assert_goes_on_bit_for_bit,
    assert_same_training,
    config_of,
    restore_and_go_on,
    save_and_go_on,
    trained_on,
)

SGD: dict[str, Any] = {
    "target": "torch.optim:SGD",
    "options": {"momentum": 0.9, "weight_decay": 0.1},
    "lr": 0.1,
}
ADAGRAD: dict[str, Any] = {"target": "torch.optim:Adagrad", "options": {"initial_accumulator_value": 0.1}}
MUON: dict[str, Any] = {"target": "orchestra.optim.muon:Muon"}
STEPS = 6


@pytest.mark.parametrize(("optim", "stages"), [(SGD, (0, 1)), (MUON, (0, 1, 2, 3))], ids=["sgd", "muon"])
def test_two_ranks_train_as_one(ranks: Ranks, optim: dict[str, Any], stages: tuple[int, ...]) -> None:
    expected = alone(config_of(optim=optim), STEPS)
    configs = [config_of(optim=optim, zero=stage) for stage in stages]
    for found in trained_on(ranks(2), configs, STEPS):
        assert_same_training(found, expected)


def test_an_optimizer_of_single_elements_trains_over_tensor_parallel_ranks(ranks: Ranks) -> None:
    expected = alone(config_of(optim=ADAGRAD, model=EVEN), STEPS)
    (found,) = trained_on(ranks(2), [config_of(optim=ADAGRAD, model=EVEN, tp=2)], STEPS)
    assert_same_training(found, expected)


@pytest.mark.parametrize("optim", [ADAGRAD, MUON], ids=["adagrad", "muon"])
def test_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, optim: dict[str, Any]) -> None:
    assert_goes_on_bit_for_bit(ranks(2), config_of(optim=optim, zero=1), tmp_path)


@pytest.mark.parametrize("optim", [ADAGRAD, MUON], ids=["adagrad", "muon"])
def test_state_restores_on_other_layouts(ranks: Ranks, tmp_path: Path, optim: dict[str, Any]) -> None:
    config = config_of(optim=optim, zero=1)
    expected = ranks(2).run(save_and_go_on, config=config, place=tmp_path, saved=3, last=6)
    for world, stage in ((3, 2), (2, 3)):
        there = config_of(optim=optim, zero=stage)
        found = ranks(world).run(restore_and_go_on, config=there, place=tmp_path, topic=f"{world}-{stage}")
        for rows, _, restored, saved in found:
            assert saved == restored
            for row, row_expected in zip(rows, expected[0][0][-3:], strict=True):
                assert row[:2] == pytest.approx(row_expected[:2], rel=1e-5)


def test_cross_entropy_as_a_loss_of_somebody_else_trains_as_our_own(ranks: Ranks) -> None:
    train = {"loss": "torch.nn.functional:cross_entropy", "loss_options": {"reduction": "none"}}
    # In two chunks, of which the second is shorter.
    configs = [config_of(train={**more, "loss_chunk_tokens": 20}, zero=3) for more in (train, {})]
    found, expected = trained_on(ranks(2), configs, STEPS)
    for of_rank, of_rank_expected in zip(found, expected, strict=True):
        for row, row_expected in zip(of_rank.rows, of_rank_expected.rows, strict=True):
            assert row[:2] == pytest.approx(row_expected[:2], rel=1e-5)


def test_sixteen_bit_parameters_follow_their_masters(ranks: Ranks) -> None:
    torch_s = {"target": "torch.optim:AdamW", "options": {"weight_decay": 0.1, "betas": [0.9, 0.95]}}
    configs = [config_of(precision="bf16", optim=optim, zero=2) for optim in (torch_s, {})]
    found, expected = trained_on(ranks(2), configs, STEPS)
    for row, row_expected in zip(found[0].rows, expected[0].rows, strict=True):
        assert row[:2] == pytest.approx(row_expected[:2], rel=1e-3)
