"""optim.target: what another optimizer is given, what of it is saved, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import ClusterConfig, Config, Device, ModelConfig, OptimConfig
from orchestra.config.rules.place_rules import trained_bytes
from orchestra.errors import ConfigError
from orchestra.model.plugged_loss import PluggedLoss
from orchestra.optim.adamw import Trained
from orchestra.optim.muon import Muon, orthogonalized
from orchestra.optim.plugged import PluggedOptimizer, gather_nothing
from orchestra.parallel.mesh import Mesh
from orchestra.plugins import Plugin, load, option_problems
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.memory.rank_memory import rank_bytes
from orchestra.sizes.topology import Layout
from orchestra.sizes.training_shape import checkpoint_bytes, training_shape
from orchestra.train.build import build_model_and_optimizer
from orchestra.train.check_plugins import look_at
from orchestra.train.dry_build import exact_bytes
from orchestra.train.state import TensorState

NO = torch.zeros((), dtype=torch.bool)
YES = torch.ones((), dtype=torch.bool)


def trained_of(*shapes: tuple[int, ...]) -> list[Trained]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    return [Trained(f"layers.0.{n}.weight", x, x, 0, x.numel()) for n, x in enumerate(tensors)]


def plugged(make: Callable[..., Any], trained: list[Trained], **optim: Any) -> PluggedOptimizer:
    optimizer = PluggedOptimizer(trained, OptimConfig(target="test:make", **optim), make)
    optimizer.prepare(lambda _: gather_nothing, lambda value: [value])
    return optimizer


def step(optimizer: PluggedOptimizer, trained: list[Trained], seed: int, is_bad: Tensor = NO) -> None:
    torch.manual_seed(seed)
    gradients = [torch.randn_like(item.master) for item in trained]
    norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients), torch.zeros(())))
    optimizer.begin_step(seed, norm, is_bad)
    optimizer.update(trained, gradients, [item.master for item in trained])


def test_it_is_torchs_own_training_with_clipping_and_a_bad_step_left_out() -> None:
    trained = trained_of((4, 6), (5,))
    own = [torch.nn.Parameter(item.master.clone()) for item in trained]
    groups = [{"params": own[:1]}, {"params": own[1:], "weight_decay": 0.0}]
    reference = torch.optim.Adam(groups, lr=0.01, weight_decay=0.1)
    optimizer = plugged(lambda params, lr: torch.optim.Adam(params, lr=lr, weight_decay=0.1), trained)
    for seed in range(1, 5):
        optimizer.lr = 0.01 * seed
        step(optimizer, trained, seed, YES if seed == 2 else NO)
        if seed == 2:
            continue
        torch.manual_seed(seed)
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        for group in reference.param_groups:
            group["lr"] = 0.01 * seed
        reference.step()
    assert optimizer.num_updates == 3
    for item, parameter in zip(trained, own, strict=True):
        torch.testing.assert_close(item.master, parameter.data, rtol=1e-5, atol=1e-7)
    assert optimizer.kinds["layers.0.0.weight"] == {"step": (), "exp_avg": None, "exp_avg_sq": None}


class Counting(torch.optim.Optimizer):
    """SGD whose steps shrink with a count in its groups, and whose state is made anew in each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.data = parameter - group["lr"] * state["mean"] / group["count"]


def test_numbers_groups_and_state_made_anew_go_on_as_they_were() -> None:
    trained, others = trained_of((4, 6), (5,)), trained_of((4, 6), (5,))
    optimizer, resumed = plugged(Counting, trained), plugged(Counting, others)
    memory = [tensor.data_ptr() for item in trained for tensor in optimizer.state[item.master].values()]
    for seed in (1, 2):
        step(optimizer, trained, seed)
    for item, other in zip(trained, others, strict=True):
        other.master.copy_(item.master)
        for name, tensor in optimizer.state[item.master].items():
            resumed.state[other.master][name].copy_(tensor)
    resumed.num_updates = optimizer.num_updates
    assert optimizer.values() == [{"count": 2}, {"count": 2}]
    resumed.restored(optimizer.values())
    for seed in (3, 4):
        step(optimizer, trained, seed)
        step(resumed, others, seed)
    assert memory == [t.data_ptr() for item in trained for t in optimizer.state[item.master].values()]
    for item, other in zip(trained, others, strict=True):
        assert torch.equal(item.master, other.master)
        assert optimizer.torch_optimizer.state[optimizer._parameters[item.name]]["steps"] == 4


def test_muon_makes_matrices_about_orthogonal_and_trains_the_rest_by_adamw() -> None:
    for shape in ((20, 48), (48, 20)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3
    trained = trained_of((8, 6), (5,))
    reference = torch.nn.Parameter(trained[1].master.clone())
    own = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = plugged(Muon, trained, lr=0.01, clip_norm=None)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        torch.randn(8, 6)
        reference.grad = torch.randn(5)
        step(optimizer, trained, seed)
        own.step()
    torch.testing.assert_close(trained[1].master, reference.data, rtol=1e-5, atol=1e-7)


def not_an_optimizer(params: Any, lr: float) -> int:
    return len(params)


def leaves_out(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[0]["params"], lr=lr)


NOT_CALLABLE = 3
HERE = __name__


@pytest.mark.parametrize(
    ("target", "options", "sentence"),
    [
        ("no_such_package.module:name", {}, "there is no module no_such_package"),
        ("torch.optim:SDG", {}, "torch.optim has no SDG; did you mean SGD?"),
        (f"{HERE}:NOT_CALLABLE", {}, "is a int and cannot be called"),
        (f"{HERE}:not_an_optimizer", {}, "returned a int, no torch.optim.Optimizer"),
        (f"{HERE}:leaves_out", {}, "leaves out layers.0.input_norm.weight"),
        ("torch.optim:SGD", {"momentun": 0.9}, "did you mean momentum?"),
        ("torch.optim:SGD", {"lr": 0.9}, "optim.options.lr: orchestra gives this itself"),
        ("torch.optim:LBFGS", {}, "a step on small parameters failed: ValueError"),
        ("orchestra.optim.muon:Muon", {"momentum": 2}, "momentum=2 is not from 0 to below 1"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    target: str, options: dict[str, Any], sentence: str
) -> None:
    found = look_at(Config(optim=OptimConfig(target=target, options=options)))
    assert len(found.problems) == 1
    assert sentence in found.problems[0]


def needs_more(params: Any, lr: float, *, depth: int) -> None: ...


def test_a_missing_option_is_named() -> None:
    plugin = Plugin("optim.target", f"{HERE}:needs_more", {}, "optim.options", 1, ("lr",))
    (problem,) = option_problems(plugin, load(plugin))
    assert problem.startswith("optim.options.depth is missing")


@pytest.mark.parametrize(
    ("target", "state_bytes", "is_parted", "gathers"),
    [
        ("torch.optim:Adagrad", 4.0, True, False),
        ("torch.optim:AdamW", 8.0, True, False),
        ("torch.optim:Adafactor", 64 / 60, False, False),
        ("orchestra.optim.muon:Muon", 4.0, True, True),
    ],
)
def test_a_try_tells_the_state_and_whether_parameters_may_be_parted(
    target: str, state_bytes: float, is_parted: bool, gathers: bool
) -> None:
    found = look_at(Config(optim=OptimConfig(target=target)))
    assert found.problems == []
    assert found.state_bytes == pytest.approx(state_bytes)
    assert (found.parts_problem is None) is is_parted
    assert found.gathers is gathers


def test_what_muon_keeps_is_counted_as_it_is_built() -> None:
    optim = OptimConfig(target="orchestra.optim.muon:Muon", state_bytes_per_parameter=4.0)
    model = ModelConfig(vocab_size=4096, num_hidden_layers=2)
    config = Config(model=model, optim=optim, cluster=ClusterConfig(device=Device.cpu, gpus_per_node=1))
    mesh = Mesh(0, Layout(1), Layout(1).coordinates(0), torch.device("cpu"), None)
    built = build_model_and_optimizer(config, mesh)
    shards = TensorState(built.parallelized, built.optimizer, mesh).snapshot()
    saved = sum(shard.tensor.nbytes for shard in shards if shard.name.startswith(("model.", "optimizer.")))
    masters = 4 * num_parameters(model)
    # The norms of layers are counted as their matrices.
    assert checkpoint_bytes(config) == pytest.approx(saved, rel=1e-3)
    assert trained_bytes(config, 1) == pytest.approx(saved + masters, rel=1e-3)
    shape = training_shape(config, Layout(1), is_gpu=False)
    own, counted = rank_bytes(shape, shape.stages[0]), exact_bytes(config, 1)
    assert own.optimizer == pytest.approx(saved - masters, rel=1e-3)
    assert counted.optimizer == pytest.approx(saved - masters, rel=1e-3)


class Together(torch.optim.SGD):
    """Takes steps of one length over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        length = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.grad.div_(length.clamp(min=1e-12))
        super().step(closure)


@pytest.mark.parametrize(("target", "is_alone"), [(f"{HERE}:Together", False), ("torch.optim:AdamW", True)])
def test_a_try_tells_whether_some_parameters_may_be_trained_alone(target: str, is_alone: bool) -> None:
    found = look_at(Config(optim=OptimConfig(target=target)))
    assert found.problems == []
    assert (found.apart_problem is None) is is_alone


class CountsByItself(torch.optim.SGD):
    """Remembers what no checkpoint holds."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        return super().step(closure)


class MakesNans(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.div_(0.0 * parameter)


@pytest.mark.parametrize(
    ("target", "sentence"), [("CountsByItself", "nothing else is saved"), ("MakesNans", "were not finite")]
)
def test_a_try_tells_what_would_not_go_on_as_it_was(target: str, sentence: str) -> None:
    (problem,) = look_at(Config(optim=OptimConfig(target=f"{HERE}:{target}"))).problems
    assert sentence in problem


def test_a_state_of_another_shape_is_refused_where_ranks_have_parts() -> None:
    trained, optim = trained_of((4, 6)), OptimConfig(target="torch.optim:Adafactor")
    optimizer = PluggedOptimizer(trained, optim, torch.optim.Adafactor, is_whole=False)
    with pytest.raises(ConfigError, match=r"row_var of layers.0.0.weight has the shape \[4, 1\]"):
        optimizer.prepare(lambda _: gather_nothing, lambda value: [value])


def test_a_plugged_loss_makes_no_gradients_where_none_are_wanted() -> None:
    """Evaluation must not write into the gradients of the training."""
    wants: list[bool] = []

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        wants.append(logits.requires_grad)
        return F.cross_entropy(logits, targets, reduction="none")

    hidden, weight = torch.randn(4, 8), torch.randn(16, 8, requires_grad=True)
    with torch.no_grad():
        evaluated = PluggedLoss(losses)(hidden, weight, torch.arange(4))
    of_tokens = torch.empty(4)
    trained = PluggedLoss(losses)(hidden, weight, torch.arange(4), token_losses=of_tokens)
    assert (wants, float(evaluated)) == ([False, True], float(trained.detach()))
    assert torch.equal(of_tokens, F.cross_entropy(hidden @ weight.T, torch.arange(4), reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_losses_of_tokens_are_summed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12_000, 4), torch.randn(300, 4)
    targets = torch.randint(0, 300, (12_000,))

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none").to(dtype)

    def exact(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    found, expected = (PluggedLoss(each)(hidden, weight, targets) for each in (losses, exact))
    assert found.dtype is torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-3 if dtype is torch.bfloat16 else 1e-5)
