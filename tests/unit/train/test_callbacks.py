"""train.callbacks and train.loss: what they add, what is kept of them, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.schema import Config, TrainConfig
from orchestra.errors import TrainingError
from orchestra.train.build import build_callbacks
from orchestra.train.check_plugins import look_at
from orchestra.train.watch.callbacks import NamedCallback, state_of

HERE = __name__


class Giving:
    """Gives its options as numbers, and counts its calls."""

    def __init__(self, **numbers: Any) -> None:
        self.numbers, self.count = numbers, 0

    def on_step(self, step: int, metrics: dict[str, Any]) -> Mapping[str, Any] | None:  # noqa: ARG002
        metrics["loss"] = None  # its own copy
        self.count += 1
        return self.numbers or None

    def state_dict(self) -> Any:
        return {"count": self.count, "odd": self.numbers.get("odd")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Second(Giving): ...


class Half(Giving):
    load_state_dict = None  # type: ignore[assignment]


class Silent:
    def __init__(self, value: int = 0) -> None: ...


def config_of(*names: str, loss: str | None = None, **options: Any) -> Config:
    targets = [f"{HERE}:{name}" for name in names]
    train = TrainConfig(callbacks=targets, callbacks_options=options)
    return Config(train=replace(train, loss=None if loss is None else f"{HERE}:{loss}"))


def test_columns_come_in_order_and_states_go_on() -> None:
    config = config_of("Giving", "Second", Giving={"a": 1.5}, Second={"b": 2})
    row = {"step": 3, "loss": 0.5}
    callbacks = build_callbacks(config, {})
    assert callbacks.columns(3, row) == {"a": 1.5, "b": 2}
    assert callbacks.columns(4, row) == {"a": 1.5, "b": 2}
    assert row == {"step": 3, "loss": 0.5}
    states = callbacks.states()
    assert states == {f"{HERE}:{name}": {"count": 2, "odd": None} for name in ("Giving", "Second")}
    assert build_callbacks(config, states).states() == states


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"mfu": 1.0}, "has that column already"),
        ({"extra": 1.0}, "has that column already"),
        ({"a": float("nan")}, "expected a finite number"),
        ({"a": "text"}, "expected a finite number"),
    ],
)
def test_a_column_that_cannot_be_ends_the_training(numbers: dict[str, Any], words: str) -> None:
    callbacks = build_callbacks(config_of("Giving", Giving=numbers), {})
    with pytest.raises(TrainingError, match=words):
        callbacks.columns(1, {"step": 1, "extra": 2.0})


def no_tensor(logits: Tensor, targets: Tensor) -> float:
    return float(len(targets))


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets)


def without_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    return targets.float()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("Silent"), "without on_step|has no on_step"),
        (config_of("Half"), "has one of state_dict"),
        (config_of("Giving", Giving={"odd": float("nan")}), "is no JSON"),
        (config_of("Giving", Giving={"odd": [{3: 1}]}), "is no JSON .key 3 is no text"),
        (config_of("Silent", Silent={"valeu": 1}), "did you mean value"),
        (config_of(loss="no_tensor"), "returned a float for logits"),
        (config_of(loss="summed"), r"returned \[\] for logits of \[4, 7\]; return one loss for each token"),
        (config_of(loss="without_gradient"), "the loss of four tokens failed"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(config: Config, words: str) -> None:
    (problem,) = look_at(config).problems
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem)


def test_a_state_that_holds_itself_is_refused_in_words() -> None:
    class Circular:
        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = {}
            state["self"] = state
            return state

    with pytest.raises(TrainingError, match=r"Circular: its state_dict\(\) is no JSON"):
        state_of(NamedCallback("mine:Circular", Circular()))
