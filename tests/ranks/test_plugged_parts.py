"""Plug-ins on several ranks: the training of one rank, whatever each rank holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Ranks
from small_trainings import (
    EVEN,
    ODD,
    alone,
    assert_goes_on_bit_for_bit,
    assert_same_training,
    config_of,
    joined,
    restore_and_go_on,
    save_and_go_on,
    trained_on,
)
from torch import Tensor, nn

from conf.schema import ModelConfig, Recompute
from orchestra.model.layers import Attention, Linear

SGD: dict[str, Any] = {
    "target": "torch.optim:SGD",
    "options": {"momentum": 0.9, "weight_decay": 0.1},
    "lr": 0.1,
}
ADAGRAD: dict[str, Any] = {"target": "torch.optim:Adagrad", "options": {"initial_accumulator_value": 0.1}}
MUON: dict[str, Any] = {"target": "orchestra.optim.muon:Muon"}
STEPS = 4


class Mixed(nn.Module):
    """A layer of nothing that orchestra knows but its attention, wider from layer to layer."""

    def __init__(self, model: ModelConfig, *, layer_number: int, factor: int = 1) -> None:
        super().__init__()
        size, self.wide = model.hidden_size, factor * (model.hidden_size + layer_number)
        self.first_norm, self.attention = nn.LayerNorm(size), Attention(model)
        self.gate = nn.Parameter(torch.empty(size))
        self.convolution = nn.Conv1d(size, size, 3, groups=size, bias=False)
        self.up, self.down = nn.Linear(size, self.wide), Linear(self.wide, size)

    def forward(self, x_BSE: Tensor, rotary: tuple[Tensor, Tensor], documents: Tensor | None) -> Tensor:
        normed_BSE = self.first_norm(x_BSE)
        before = F.pad(normed_BSE.transpose(1, 2), (2, 0))
        x_BSE = x_BSE + self.gate * self.attention(normed_BSE, rotary, documents)
        x_BSE = x_BSE + self.convolution(before).transpose(1, 2)
        # A weight that is used twice, and by a function of orchestra's.
        return x_BSE + self.down(F.gelu(self.up(x_BSE))) - self.down(torch.sin(self.up(x_BSE)))

    def initial_normal(self, name: str) -> tuple[float, float] | None:
        return {"gate": (0.5, 0.1), "convolution.weight": (0.0, 0.2)}.get(name)


MIXED = replace(ODD, block=f"{__name__}:Mixed", block_options={"factor": 2})


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


def test_layers_of_somebody_else_train_on_ranks_as_on_one(ranks: Ranks, tmp_path: Path) -> None:
    expected = alone(config_of(MIXED), STEPS)
    kinds = ("none", "selective", "full", "selective")
    configs = [
        config_of(MIXED, train={"recompute": Recompute(kind)}, zero=stage) for stage, kind in enumerate(kinds)
    ]
    for found in trained_on(ranks(2), configs, STEPS):
        assert_same_training(found, expected)
    gates = {name: value for name, value in joined([expected]).items() if name.endswith("gate")}
    assert sorted(gates) == [
        f"{kind}.layers.{n}.gate"
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for n in range(5)
    ]
    assert_goes_on_bit_for_bit(ranks(2), config_of(MIXED, precision="bf16", zero=3), tmp_path)


def test_layers_of_somebody_else_restore_on_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    written = config_of(MIXED, zero=1)
    expected = ranks(2).run(save_and_go_on, config=written, place=tmp_path, saved=3, last=6)
    there = config_of(MIXED, zero=3)
    for rows, _, restored, saved in ranks(3).run(restore_and_go_on, config=there, place=tmp_path, topic="x"):
        assert saved == restored
        for row, row_expected in zip(rows, expected[0][0], strict=True):
            assert row[:2] == pytest.approx(row_expected[:2], rel=1e-5)


def test_our_own_layer_as_a_plug_in_is_the_same_model() -> None:
    mine = replace(ODD, block="orchestra.model.transformer:Block")
    assert_same_training([alone(config_of(mine), STEPS)], alone(config_of(), STEPS))
