"""What a checkpoint holds: tensors that come back in place, and a state that is the same through JSON."""

from __future__ import annotations

import copy
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank_attempts import config_of

from checkpointing.manifest import Manifest, Tensor
from checkpointing.shards import Shard
from conf.schema import BlendPart, Config, DataConfig, ExpertPlacement, PrecisionConfig, PrecisionName, Source
from orchestra.cli import main
from orchestra.data.token_files import file_system
from orchestra.errors import EXIT_DO_NOT_RESTART, UnusableCheckpointError
from orchestra.parallel.mesh import Mesh
from orchestra.precision.policies import ScaleState
from orchestra.run.rollback import Stretch
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from orchestra.train.metrics import Totals
from orchestra.train.state import Position, TensorState, changes, facts, position_from_json, position_to_json
from orchestra.train.watch.bad_losses import NonFiniteSteps

SMALL = config_of()
CONFIG = replace(
    SMALL,
    model=replace(SMALL.model, tie_word_embeddings=True),
    precision=PrecisionConfig(name=PrecisionName.bf16),
)


def state_of(rank: int = 0, config: Config = CONFIG) -> tuple[Training, TensorState]:
    degrees = Layout(dp=2)
    mesh = Mesh(rank, degrees, degrees.coordinates(rank), torch.device("cpu"), None)
    training = build_training(config, mesh)
    return training, TensorState(training.parallelized, training.optimizer, mesh)


def manifest_of(shards: list[Shard]) -> Manifest:
    """Return a manifest of whole tensors, none of which lies anywhere."""
    tensors = {shard.name: Tensor(shard.dtype, shard.shape, f"{0:016x}", ()) for shard in shards}
    return Manifest(5, 0, 0.0, {}, tensors, {}, {})


def test_the_state_is_masters_and_moments_by_parameter_and_a_generator_by_place() -> None:
    training, state = state_of(rank=1)
    names = [name for name, _ in training.parallelized.model.named_parameters()]
    assert "lm_head.weight" not in names  # tied: one tensor, saved once
    dtypes = {shard.name: shard.dtype for shard in state.snapshot()}
    generator = "rng.cpu.pp0-dp1-cp0-tp0"
    assert dtypes.keys() == {
        *(f"model.{name}" for name in names),
        *(f"optimizer.exp_avg.{name}" for name in names),
        *(f"optimizer.exp_avg_sq.{name}" for name in names),
        generator,
    }
    del dtypes[generator]
    assert set(dtypes.values()) == {"F32"}


def test_generators_come_back_where_the_checkpoint_has_this_place_s() -> None:
    _, state = state_of(rank=1)
    torch.manual_seed(7)
    saved = [shard for shard in state.snapshot() if shard.name.startswith("rng.")]
    expected = torch.rand(3)
    torch.manual_seed(8)
    state.take_back(manifest_of(saved), Position())
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(8)
    untouched = torch.rand(3)
    torch.manual_seed(8)
    state.take_back(manifest_of([]), Position())
    assert torch.equal(torch.rand(3), untouched)


def placed_state() -> tuple[Training, TensorState]:
    model = replace(SMALL.model, num_hidden_layers=2, num_experts=4, moe_intermediate_size=8)
    shape = replace(SMALL.parallelism, ep=2, expert_placement=ExpertPlacement.auto)
    degrees = Layout(dp=2, ep=2)
    mesh = Mesh(0, degrees, degrees.coordinates(0), torch.device("cpu"), None)
    training = build_training(replace(SMALL, model=model, parallelism=shape), mesh)
    return training, TensorState(training.parallelized, training.optimizer, mesh)


def test_only_experts_that_have_moved_and_tokens_that_have_come_are_written_down() -> None:
    training, state = placed_state()
    assert state.experts is not None
    assert state.experts.state() == {"ep": 2, "order": {}, "tokens": {}}
    balance = training.parallelized.expert_balance
    assert balance is not None
    balance.shares[1] = replace(balance.shares[1], order=(2, 1, 0, 3))
    balance.count_anew({0: [7, 0, 0, 1]})
    assert state.experts.state() == {"ep": 2, "order": {"1": [2, 1, 0, 3]}, "tokens": {"0": [7, 0, 0, 1]}}


@pytest.mark.parametrize(
    "section",
    [
        *({"order": {"1": order}} for order in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], None)),
        {"order": {"9": [0, 1, 2, 3]}},
        {"tokens": {"0": [0, 1, 2, -1]}},
        {"tokens": [1]},
    ],
    ids=str,
)
def test_a_placement_that_no_run_has_is_refused(section: dict[str, Any]) -> None:
    _, state = placed_state()
    assert state.experts is not None
    with pytest.raises(UnusableCheckpointError, match=rf"experts\.{next(iter(section))}"):
        state.experts.restore({"ep": 2, **section})


def test_a_state_of_moved_experts_is_not_taken_for_that_of_others() -> None:
    _, state = state_of()
    moved = Position(experts={"ep": 2, "order": {"1": [2, 1, 0, 3]}, "tokens": {}})
    with pytest.raises(UnusableCheckpointError, match="expert_placement=auto"):
        state.take_back(None, moved)
    state.take_back(None, Position(experts={"ep": 2, "order": {}, "tokens": {}}))
    # A checkpoint has each at its own place of the whole tensor.
    state.take_back(manifest_of([]), moved)


def test_a_checkpoint_of_other_tensors_is_refused_and_the_first_few_are_named() -> None:
    _, state = state_of()
    untied = replace(CONFIG, model=replace(CONFIG.model, tie_word_embeddings=False, intermediate_size=40))
    _, other = state_of(config=untied)
    with pytest.raises(UnusableCheckpointError) as caught:
        state.wanted(manifest_of(other.snapshot()))
    assert "model.layers.0.mlp.gate_proj.weight is [40, 16] there and [24, 16] here" in str(caught.value)
    assert "more" in str(caught.value)
    with pytest.raises(UnusableCheckpointError, match=r"model\.norm\.weight is not in it"):
        state.wanted(manifest_of([shard for shard in state.snapshot() if shard.name != "model.norm.weight"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model.hidden_size", 32), ("optim.state_dtype", "bf16"), ("train.seed", 99), ("train.seq_len", 4)),
        *(("data.source", "jsonl"), ("data.path", "/elsewhere")),
        # Tensors of the same shapes, with another meaning.
        ("model.num_attention_heads", 1),
    ],
)
def test_another_model_order_of_samples_or_type_of_moments_is_refused_with_both_values(
    key: str, value: object
) -> None:
    now = facts(CONFIG)
    with pytest.raises(UnusableCheckpointError, match=rf"{key}={value}\W+this run has ({key}=)?{now[key]}\W"):
        changes({**now, key: value}, now)


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_other_tokens_under_the_same_path_are_refused(is_remote: bool, tmp_path: Path) -> None:
    prefix = f"memory:/{tmp_path}/packed" if is_remote else str(tmp_path / "packed")
    system, path = file_system(prefix)

    def packed(text: str) -> dict[str, Any]:
        (tmp_path / "a.txt").write_text(text)
        for file in system.glob(f"{path}.*"):
            system.rm(file)
        assert main(["data", "pack", str(tmp_path / "a.txt"), "--output", prefix]) == 0
        data = DataConfig(source=Source.tokens, path=prefix)
        return facts(replace(CONFIG, data=data))

    saved = packed("once upon a time")
    assert changes(saved, packed("once upon a time")) == {}
    with pytest.raises(UnusableCheckpointError, match=r"data.tokens=17 uint16 \w+ \(this run has 17"):
        changes(saved, packed("once upon a TIME"))
    # Checkpoints of before say nothing of them.
    without = {key: value for key, value in saved.items() if key != "data.tokens"}
    assert changes(without, packed("other")) == {}


def test_another_blend_of_the_same_files_is_refused() -> None:
    def blended(*weights: float) -> dict[str, Any]:
        parts = [BlendPart(f"memory://{name}", weight) for name, weight in zip("ab", weights, strict=True)]
        return facts(replace(CONFIG, data=DataConfig(source=Source.tokens, blend=parts)))

    assert changes(blended(1, 2), blended(1, 2)) == {}
    with pytest.raises(UnusableCheckpointError, match=r"data\.blend=.*memory://b', 3.* \(this run has .*, 2"):
        changes(blended(1, 3), blended(1, 2))
    # Checkpoints of before say nothing of it.
    without = {key: value for key, value in blended(1, 3).items() if key != "data.blend"}
    assert changes(without, blended(1, 2)) == {}


def test_the_library_of_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = facts(CONFIG)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.1")
    with pytest.raises(
        UnusableCheckpointError, match=r"\(this run has Python 3\.99\.1\).*go on with that Python"
    ):
        changes(now, facts(CONFIG))
    # Checkpoints of before say nothing of it.
    assert changes({key: value for key, value in now.items() if key != "data.stdlib"}, facts(CONFIG)) == {}


def test_a_change_that_a_run_may_make_is_told_and_not_refused() -> None:
    now = facts(CONFIG)
    assert changes(now, now) == {}
    assert changes({**now, "precision": "fp32"}, now) == {"precision": ["fp32", "bf16"]}
    # Checkpoints of before there was a choice say nothing.
    assert changes({key: value for key, value in now.items() if key != "optim.state_dtype"}, now) == {}


POSITION = Position(
    step=7,
    samples=84,
    num_updates=6,
    nonfinite=NonFiniteSteps(num_skipped=1, num_in_a_row=0),
    totals=Totals(started_at=1.7e9 + 0.1, tokens=1344, productive_s=0.1 + 0.2),
    score=1 / 3,
    recent_losses=(2.5, 0.1 + 0.2, 1e-3),
    left_out=(Stretch(40, 80), Stretch(96, 100)),
)


SCALED = replace(POSITION, loss_scale=ScaleState(4096.0, 12, 3))
DELAYED = replace(POSITION, fp8_sizes={"q.input": 0.1 + 0.2, "q.gradient": 0.0})
# A loss that is not finite is no score.
UNSCORED = Position(step=1, totals=POSITION.totals)


@pytest.mark.parametrize(
    "position", [POSITION, SCALED, DELAYED, UNSCORED], ids=["usual", "scaled", "fp8", "unscored"]
)
def test_a_position_survives_json_bit_for_bit(position: Position) -> None:
    state = position_to_json(position)
    assert position_from_json(json.loads(json.dumps(state))) == position
    assert ("loss_scale" in state) is (position is SCALED)
    assert ("fp8_sizes" in state) is (position is DELAYED)
    assert (state["score"] is None) is (position is UNSCORED)


@pytest.mark.parametrize("losses", [None, "3.0", [1.0, "2"], [float("nan")]])
def test_without_sound_losses_the_window_of_spikes_begins_anew(losses: Any) -> None:
    state = {**position_to_json(POSITION), "recent_losses": losses}
    assert position_from_json(state).recent_losses == ()
    del state["recent_losses"]
    assert position_from_json(state).recent_losses == ()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *((None, key) for key in ("step", "samples", "tokens", "optimizer", "nonfinite", "metrics")),
        ("optimizer", "step"),
        ("nonfinite", "num_in_a_row"),
        ("metrics", "productive_s"),
    ],
)
@pytest.mark.parametrize("value", [None, -1, "7", True, [], {"a": 1}])
def test_a_state_of_somebody_else_is_refused_by_the_key_that_is_wrong(
    section: str | None, key: str, value: Any
) -> None:
    state: dict[str, Any] = copy.deepcopy(position_to_json(POSITION))
    (state if section is None else state[section])[key] = value
    if (key, value) == ("productive_s", -1):
        return  # a number all the same
    with pytest.raises(UnusableCheckpointError, match=section or key) as caught:
        position_from_json(state)
    assert caught.value.exit_code == EXIT_DO_NOT_RESTART


@pytest.mark.parametrize(
    ("key", "value"),
    [("scale", 3.0), ("scale", 0.5), ("scale", 2.0**30), ("num_good_steps", -1), ("scale", None)],
)
def test_a_factor_that_no_run_has_is_refused(key: str, value: Any) -> None:
    state: dict[str, Any] = copy.deepcopy(position_to_json(SCALED))
    state["loss_scale"][key] = value
    with pytest.raises(UnusableCheckpointError, match=key):
        position_from_json(state)


@pytest.mark.parametrize(
    "sizes", [None, [1.0], {"q.input": -1.0}, {"q.input": "1"}, {"q.input": float("inf")}]
)
def test_sizes_that_no_run_has_are_refused(sizes: Any) -> None:
    with pytest.raises(UnusableCheckpointError, match="fp8_sizes"):
        position_from_json({**position_to_json(POSITION), "fp8_sizes": sizes})
