"""The tensors of the state: which there are, and that they come back in place, generators by theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpointing.manifest import Manifest, Tensor
from checkpointing.shards import Shard
from conf.schema import Config, ModelConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.errors import UnusableCheckpointError
from orchestra.parallel.mesh import Mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from orchestra.train.state import TensorState, changes, facts

CONFIG = Config(
    model=ModelConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    ),
    precision=PrecisionConfig(name=PrecisionName.bf16),
    train=TrainConfig(seq_len=8),
)


def state_of(rank: int = 0, config: Config = CONFIG) -> tuple[Training, TensorState]:
    degrees = Layout(dp=2)
    mesh = Mesh(rank, degrees, degrees.coordinates(rank), torch.device("cpu"), None)
    training = build_training(config, mesh)
    return training, TensorState(training.parallelized, training.optimizer, mesh)


def manifest_of(shards: list[Shard]) -> Manifest:
    """Return a manifest of whole tensors, none of which lies anywhere."""
    tensors = {it.name: Tensor(it.dtype, it.shape, f"{0:016x}", ()) for it in shards}
    return Manifest(5, 0, 0.0, {}, tensors, {}, {})


def test_the_state_is_masters_and_moments_by_parameter_and_a_generator_by_place() -> None:
    training, state = state_of(rank=1)
    names = [name for name, _ in training.parallelized.model.named_parameters()]
    assert "lm_head.weight" not in names  # tied: one tensor, saved once
    assert {shard.name for shard in state.snapshot()} == {
        *(f"model.{name}" for name in names),
        *(f"optimizer.exp_avg.{name}" for name in names),
        *(f"optimizer.exp_avg_sq.{name}" for name in names),
        "rng.cpu.pp0-dp1-cp0-tp0",
    }
    assert all(it.dtype == "F32" for it in state.snapshot() if not it.name.startswith("rng."))


def test_filled_shards_reach_masters_moments_parameters_and_updates() -> None:
    training, state = state_of()
    manifest = manifest_of(state.snapshot())
    for number, shard in enumerate(state.wanted(manifest)):
        if not shard.name.startswith("rng."):
            shard.tensor.fill_(number + 1 / 3)
    state.take_back(manifest, updates=17)
    assert state.num_updates == 17
    for number, item in enumerate(training.parallelized.trained):
        assert bool((item.master == torch.tensor(number + 1 / 3)).all())
        assert torch.equal(item.parameter, item.master.bfloat16())
        moments = training.optimizer.state[item.master]
        assert float(moments["exp_avg"].flatten()[0]) == pytest.approx(
            number + 1 / 3 + len(training.parallelized.trained)
        )


def test_generators_come_back_where_the_checkpoint_has_this_place_s() -> None:
    _, state = state_of(rank=1)
    torch.manual_seed(7)
    saved = [shard for shard in state.snapshot() if shard.name.startswith("rng.")]
    expected = torch.rand(3)
    torch.manual_seed(8)
    state.take_back(manifest_of(saved), updates=0)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(8)
    untouched = torch.rand(3)
    torch.manual_seed(8)
    state.take_back(manifest_of([]), updates=0)
    assert torch.equal(torch.rand(3), untouched)


def test_a_checkpoint_of_other_tensors_is_refused_and_the_first_few_are_named() -> None:
    _, state = state_of()
    untied = replace(CONFIG, model=replace(CONFIG.model, tie_word_embeddings=False, intermediate_size=40))
    _, other = state_of(config=untied)
    with pytest.raises(UnusableCheckpointError) as caught:
        state.wanted(manifest_of(other.snapshot()))
    assert "model.layers.0.mlp.gate_proj.weight is [40, 16] there and [24, 16] here" in str(caught.value)
    assert "more" in str(caught.value)
    with pytest.raises(UnusableCheckpointError, match=r"model\.norm\.weight is not in it"):
        state.wanted(manifest_of([it for it in state.snapshot() if it.name != "model.norm.weight"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.seed", 99), ("train.seq_len", 4), ("data.source", "jsonl"), ("data.path", "/elsewhere")],
)
def test_another_order_of_samples_is_refused_with_both_values(key: str, value: object) -> None:
    now = facts(CONFIG)
    with pytest.raises(UnusableCheckpointError) as caught:
        changes({**now, key: value}, now)
    assert f"{key}={value} (this run has {now[key]})" in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_moments_of_another_type_are_refused_with_both_values() -> None:
    now = facts(CONFIG)
    with pytest.raises(UnusableCheckpointError, match=r"optim\.state_dtype=bf16, this run has fp32; moments"):
        changes({**now, "optim.state_dtype": "bf16"}, now)
    # Checkpoints of before there was a choice say nothing.
    assert changes({key: value for key, value in now.items() if key != "optim.state_dtype"}, now) == {}


def test_a_change_that_a_run_may_make_is_told_and_not_refused() -> None:
    now = facts(CONFIG)
    assert changes(now, now) == {}
    assert changes({**now, "precision": "fp32"}, now) == {"precision": ["fp32", "bf16"]}
