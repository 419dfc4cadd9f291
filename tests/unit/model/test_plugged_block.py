"""model.block=package.module:name: layers of somebody else, looked at before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.schema import Config, ModelConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.errors import DataError
from orchestra.huggingface.config_json import config_document
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.sizes.flops import model_flops_per_token, num_layer_parameters, num_parameters, tensor_splits
from orchestra.train.build import meta_model
from orchestra.train.check_plugins import look_at
from orchestra.train.metrics import meter_settings

MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)
SHARED = nn.Parameter(torch.empty(16))


class Wider(nn.Module):
    """A layer whose inner width grows by `step` from layer to layer."""

    def __init__(self, model: ModelConfig, *, layer_number: int, step: int = 0) -> None:
        super().__init__()
        size = model.hidden_size
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, size + step * layer_number)
        self.down_proj = nn.Linear(self.up.out_features, size)
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:  # noqa: ARG002
        out: Tensor = x_BSE + self.gate * self.down_proj(torch.relu(self.up(self.norm(x_BSE))))
        return out

    def initial_normal(self, name: str) -> tuple[float, float] | None:
        return {"gate": (0.25, 0.0), "up.weight": (1.0, 0.5)}.get(name)


class Buffered(Wider):
    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.register_buffer("mean", torch.zeros(1))


class Scalar(Wider):
    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.gate = nn.Parameter(torch.empty(()))


class Frozen(Wider):
    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.gate.requires_grad_(requires_grad=False)


class Sharing(Wider):
    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.extra = SHARED


class Idle(Wider):
    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.extra = nn.Parameter(torch.empty(3))


class Short(Wider):
    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:
        return super().forward(x_BSE, rotary, documents)[:, 1:]


class Wide(Wider):
    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:
        return super().forward(x_BSE, rotary, documents).float()


class Remembering(Wider):
    """Its table is made without values, as all tensors are at that moment."""

    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.table = torch.ones(model.hidden_size)

    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:
        return super().forward(x_BSE * self.table, rotary, documents)


class Unsure(Wider):
    def initial_normal(self, name: str) -> tuple[float, float] | None:
        return (0.0, -1.0) if name == "gate" else None


class Last(Wider):
    """Right but for its last layer."""

    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.is_last = layer_number == model.num_hidden_layers - 1

    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:
        out = super().forward(x_BSE, rotary, documents)
        return out[:1] if self.is_last else out


class Middle(Wider):
    """One layer between others is of another kind, and wrong."""

    def __init__(self, model: ModelConfig, *, layer_number: int) -> None:
        super().__init__(model, layer_number=layer_number)
        self.other = nn.LayerNorm(model.hidden_size) if layer_number == 1 else None

    def forward(self, x_BSE: Tensor, rotary: Any, documents: Any) -> Tensor:
        out = super().forward(x_BSE, rotary, documents)
        return out if self.other is None else self.other(out)[:1]


def not_a_layer(model: ModelConfig) -> Any:
    return model.name


def config_of(name: str, precision: PrecisionName = PrecisionName.fp32, **options: Any) -> Config:
    model = replace(MODEL, block=f"{__name__}:{name}", block_options=options)
    train = TrainConfig(seq_len=8, global_batch_size=2, micro_batch_size=2)
    return Config(model=model, train=train, precision=PrecisionConfig(precision))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Buffered", ["layer 0 has the buffer mean", "or a parameter of it"]),
        ("Scalar", ["the parameter gate without dims", "[1]"]),
        ("Frozen", ["the parameter gate, which is not trained"]),
        ("Sharing", ["layer 1 shares the parameter extra with another layer"]),
        ("Idle", ["does not use extra"]),
        ("Short", ["returned [2, 7, 16]", "for [2, 8, 16]"]),
        ("Wide", ["returned [2, 8, 16] of torch.float32 for [2, 8, 16] of torch.bfloat16"]),
        ("Remembering", ["failed in its forward or backward pass", "meta"]),
        ("Last", ["layer 2 returned [1, 8, 16]"]),
        ("Middle", ["layer 1 returned [1, 8, 16]"]),
        ("Unsure", ["gives gate the mean 0.0 and the standard deviation -1.0"]),
        ("not_a_layer", ["layer 0 is a str; return a torch.nn.Module"]),
    ],
)
def test_what_cannot_be_trained_is_said(name: str, words: Sequence[str]) -> None:
    (problem,) = look_at(config_of(name, PrecisionName.bf16)).problems
    assert problem.startswith(f"model.block={__name__}:{name}: ")
    assert all(word in problem for word in words), problem


def test_parameters_are_counted_layer_by_layer_and_flops_are_not_guessed() -> None:
    config = config_of("Wider", step=4)
    found = look_at(config)
    assert found.problems == []
    counted = replace(config, model=replace(config.model, block_parameters=found.block_parameters))
    model = meta_model(counted)
    assert num_parameters(counted.model) == sum(each.numel() for each in model.parameters())
    layers = model.get_submodule("layers")
    assert num_layer_parameters(counted.model) == sum(each.numel() for each in layers.parameters()) // 3
    assert tensor_splits(counted.model) == [1]
    settings = meter_settings(counted, 1, 1e12, torch.device("cpu"))
    assert (settings.model_flops, settings.model_flops_causal, settings.hardware_flops) == (None, None, None)
    assert meter_settings(Config(), 1, 1e12, torch.device("cpu")).model_flops == model_flops_per_token(
        Config().model, Config().train.seq_len
    )
    with pytest.raises(DataError, match="has no Hugging Face form"):
        config_document(counted.model, "F32", None)


def test_a_layer_says_its_initial_values_and_the_rule_fills_the_rest() -> None:
    model = meta_model(config_of("Wider"))
    model.to_empty(device="cpu")
    fill_initial_values(model, 1)
    layer = model.get_submodule("layers.1")
    assert isinstance(layer, Wider)
    assert (layer.gate.item(), layer.norm.weight.unique().item(), layer.norm.bias.unique().item()) == (
        0.25,
        1,
        0,
    )
    assert layer.up.weight.mean().item() == pytest.approx(1.0, abs=0.1)
    assert layer.up.weight.std().item() == pytest.approx(0.5, rel=0.15)
    # As residual outputs of orchestra's own.
    assert layer.down_proj.weight.std().item() == pytest.approx(MODEL.init_std / 6**0.5, rel=0.15)
    other = Transformer(MODEL)
    fill_initial_values(other, 1)
    assert torch.equal(other.embed_tokens.weight, model.embed_tokens.weight)
