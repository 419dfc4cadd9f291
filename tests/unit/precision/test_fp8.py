"""Products in fp8 against the same arithmetic in fp32, and a whole model with them. Products of fp8 on CPU
stand in for those of a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from conf.schema import (
    Config,
    Family,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    PrecisionName,
    Recompute,
    Scaling,
    TrainConfig,
)
from orchestra.errors import TrainingError
from orchestra.model.weight_gradients import LaterGradients, WeightGradient, attach
from orchestra.parallel.blocks import refuse_missing_hardware
from orchestra.parallel.mesh import make_mesh
from orchestra.precision.fp8 import (
    BACKWARD,
    FORWARD,
    Fp8Products,
    Rounded,
    attach_rounded,
    attached,
    round_weight_,
    rounded,
    rounded_by,
    rounded_in_parts,
    turn_,
)
from orchestra.precision.rounded_weights import RoundedWeights
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from tests.support import fp8_products
from tests.support.called_operators import num_called
from tests.support.torch_features import EACH_SCALING, NEEDS_ROW_PRODUCTS

TOKENS, INPUTS, OUTPUTS = 32, 48, 64


def numbers(seed: int, *shape: int) -> Tensor:
    """bf16 numbers whose rows differ much in size."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.logspace(-3, 2, shape[0]).unsqueeze(1)
    return (torch.randn(shape, generator=generator) * rows).to(torch.bfloat16)


def wide(matrix: Rounded) -> Tensor:
    return matrix.values.float() * matrix.scale


def emulated(x: Tensor, weight: Tensor, grad: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Return product and both gradients of the rounded factors, computed in fp32."""

    def by_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
        return wide(rounded(matrix, dtype, scaling))

    def by_columns(matrix: Tensor, dtype: torch.dtype) -> Tensor:
        return by_rows(matrix.t().contiguous(), dtype).t()

    out = by_rows(x, FORWARD) @ by_rows(weight, FORWARD).t()
    grad_x = by_rows(grad, BACKWARD) @ by_columns(weight, FORWARD)
    grad_weight = by_columns(grad, BACKWARD).t() @ by_columns(x, FORWARD)
    return out, grad_x, grad_weight


@pytest.mark.parametrize("scaling", EACH_SCALING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_products_of_these_tests_are_torchs_own(scaling: Scaling, dtype: torch.dtype) -> None:
    left = rounded(numbers(0, TOKENS, INPUTS), BACKWARD, scaling)
    right = rounded(numbers(1, OUTPUTS, INPUTS), FORWARD, scaling)
    right_scale = right.scale.t() if right.scale.dim() else right.scale

    def product(**into: Tensor) -> Tensor:
        return torch._scaled_mm(
            left.values, right.values.t(), left.scale, right_scale, out_dtype=dtype, **into
        )

    found = product()
    assert torch.equal(product(out=torch.empty_like(found)), found)
    with fp8_products.torchs_own():
        expected = product()
    # A last digit of some sums may be another one.
    torch.testing.assert_close(
        found, expected, rtol=torch.finfo(dtype).eps, atol=1e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("scaling", Scaling)
def test_the_largest_number_takes_the_whole_range_and_zeros_stay(
    dtype: torch.dtype, scaling: Scaling
) -> None:
    matrix = numbers(0, 16, 32)
    matrix[3] = 0.0
    found = rounded(matrix, dtype, scaling)
    limit = torch.finfo(dtype).max
    assert float(found.values.float().abs().max()) == limit
    if scaling is Scaling.row:
        largest = found.values.float().abs().amax(1)
        assert sorted(largest.tolist()) == [0.0, *[limit] * 15]
    assert torch.equal(wide(found)[3], torch.zeros(32))
    digits = {FORWARD: 2**-4, BACKWARD: 2**-3}[dtype]
    large = matrix.float().abs() > found.scale * 0.1
    off = (wide(found) - matrix.float()).abs() / matrix.float().abs()
    assert float(off[large].max()) <= digits


@pytest.mark.parametrize("scaling", EACH_SCALING)
def test_products_and_gradients_are_those_of_the_rounded_factors(scaling: Scaling) -> None:
    x = numbers(1, TOKENS, INPUTS).requires_grad_()
    weight = numbers(2, OUTPUTS, INPUTS).requires_grad_()
    grad = numbers(3, TOKENS, OUTPUTS)
    out = Fp8Products(scaling).linear(x, weight)
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    expected = emulated(x.detach(), weight.detach(), grad, scaling)
    for found, exact in zip((out.detach(), x.grad, weight.grad), expected, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=2e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("scaling", EACH_SCALING)
def test_a_scale_for_each_row_keeps_small_rows(scaling: Scaling) -> None:
    """Per tensor the smallest rows are below the resolution; per row every row is as exact as another."""
    x, weight = numbers(1, TOKENS, INPUTS), numbers(2, OUTPUTS, INPUTS)
    exact = x.float() @ weight.float().t()
    off = (Fp8Products(scaling).linear(x, weight).float() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(off[-1]) < 0.1
    assert (float(off[0]) < 0.1) is (scaling is Scaling.row)


def test_several_products_of_one_input_add_up_its_gradients() -> None:
    linears = [nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16) for _ in range(3)]
    x = numbers(4, TOKENS, INPUTS).view(2, TOKENS // 2, INPUTS).requires_grad_()
    products = Fp8Products(Scaling.tensor)
    outs = products(x, *linears)
    apart = [products.linear(x, linear.weight, linear.bias) for linear in linears]
    for out, alone in zip(outs, apart, strict=True):
        assert torch.equal(out, alone)
        assert out.shape == (2, TOKENS // 2, OUTPUTS)
    (together,) = torch.autograd.grad(sum(out.float().sum() for out in outs), x)  # type: ignore[arg-type]
    (summed,) = torch.autograd.grad(sum(out.float().sum() for out in apart), x)  # type: ignore[arg-type]
    torch.testing.assert_close(together, summed, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scaling", EACH_SCALING)
def test_gradients_of_weights_are_made_when_they_are_taken(scaling: Scaling, is_compiled: bool) -> None:
    """A schedule may take them later: what is multiplied before are the gradients of inputs."""
    linears = [nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    memory = [torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16) for _ in linears]
    later = LaterGradients()
    takers = [WeightGradient(lambda into=into: (into, False), lambda: None, later) for into in memory]
    for linear, taker in zip(linears, takers, strict=True):
        attach(linear.weight, taker)
    products = Fp8Products(scaling)
    multiply = torch.compile(products, backend="aot_eager") if is_compiled else products

    def num_in_backward() -> int:
        outs = multiply(numbers(1, TOKENS, INPUTS).requires_grad_(), *linears)
        grads = [numbers(seed, TOKENS, OUTPUTS) for seed in (4, 5)]
        return num_called("aten::_scaled_mm", lambda: torch.autograd.backward(outs, grads))

    num_in_backward()  # what is compiled calls it too
    assert num_in_backward() == 4
    at_once = [into.clone() for into in memory]
    for into in memory:
        into.zero_()
    later.is_open = True
    assert num_in_backward() == 2
    assert not any(into.any() for into in memory)
    assert num_called("aten::_scaled_mm", lambda: [take() for take in later.kept()]) == 2
    for into, expected in zip(memory, at_once, strict=True):
        assert into.any()
        assert torch.equal(into, expected)


# As small as the claims allow: losses fall by 7 %, and those of fp8 stay within 0.02 % of bf16.
MODEL = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
STEPS, BATCH, SEQUENCE = 4, 2, 16


def config_of(name: PrecisionName, model: ModelConfig = MODEL, **precision: object) -> Config:
    return Config(
        model=model,
        precision=replace(PrecisionConfig(name=name), **precision),  # type: ignore[arg-type]
        optim=OptimConfig(lr=3e-3, warmup_steps=0),
        train=TrainConfig(steps=STEPS, seq_len=SEQUENCE, global_batch_size=BATCH, micro_batch_size=BATCH),
    )


def built(config: Config) -> Training:
    return build_training(config, make_mesh(0, Layout(dp=1), torch.device("cpu")))


def losses(config: Config) -> list[float]:
    training = built(config)
    tokens = torch.randint(0, 64, (1, BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return [float(training.step.run(step, tokens).loss) for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "family", "recompute"),
    [
        (Scaling.tensor, Family.llama, Recompute.selective),
        (Scaling.tensor, Family.gpt, Recompute.none),
        pytest.param(Scaling.row, Family.llama, Recompute.none, marks=NEEDS_ROW_PRODUCTS),
        pytest.param(Scaling.row, Family.gpt, Recompute.full, marks=NEEDS_ROW_PRODUCTS),
    ],
)
def test_losses_of_fp8_follow_those_of_bf16(scaling: Scaling, family: Family, recompute: Recompute) -> None:
    model = replace(MODEL, family=family)
    expected = losses(config_of(PrecisionName.bf16, model))
    config = config_of(PrecisionName.fp8, model, fp8_scaling=scaling)
    found = losses(replace(config, train=replace(config.train, recompute=recompute)))
    assert expected[-1] < 0.97 * expected[0]
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected


def test_only_products_of_the_blocks_that_are_not_kept_change(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, ...]] = []
    scaled = torch._scaled_mm

    def counting(*arguments: Tensor, **options: object) -> Tensor:
        counted.append(tuple(arguments[0].shape))
        return scaled(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", counting)
    model = replace(MODEL, num_hidden_layers=3)
    training = built(config_of(PrecisionName.fp8, model, fp8_bf16_blocks=1))
    training.parallelized.model(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))
    # Queries, keys, values, the attention's output; gate, up, down: of one block, forward alone.
    assert len(counted) == 7
    assert all(parameter.dtype == torch.bfloat16 for parameter in training.parallelized.model.parameters())


# With latent attention, whose matrices are as many.
EXPERTS = replace(
    MODEL,
    num_key_value_heads=8,
    kv_lora_rank=16,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
)


@pytest.mark.parametrize(
    ("model", "recompute", "fp8_output"),
    [
        (MODEL, Recompute.none, True),
        (MODEL, Recompute.full, False),
        (MODEL, Recompute.none, False),
        # Stacks by rows, the shared expert's matrices, and no router.
        pytest.param(EXPERTS, Recompute.full, False, marks=NEEDS_ROW_PRODUCTS),
    ],
)
def test_each_weight_is_rounded_once_a_step_whatever_the_micro_batches(
    model: ModelConfig, recompute: Recompute, fp8_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(PrecisionName.fp8, model, fp8_output=fp8_output)
    # Two chunks of the loss for each of three micro-batches.
    sizes = {"global_batch_size": 3 * BATCH, "loss_chunk_tokens": BATCH * SEQUENCE // 2}
    config = replace(config, train=replace(config.train, recompute=recompute, **sizes))
    training = built(config)
    transformer = training.parallelized.model
    weights = [value for name, value in transformer.named_parameters() if "proj" in name]
    weights += [transformer.lm_head.weight] * fp8_output
    places = {weight.data_ptr() for weight in weights}
    all_places = {weight.data_ptr() for weight in transformer.parameters()}
    counted: list[int] = []

    def counting(scale: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        counted.append(matrix.data_ptr())
        return rounded_by(scale, matrix, dtype)

    monkeypatch.setattr("orchestra.precision.fp8.rounded_by", counting)
    tokens = torch.zeros((3, BATCH, SEQUENCE + 1), dtype=torch.int64)
    for step in (1, 2):
        counted.clear()
        training.step.run(step, tokens)
        of_weights = [place for place in counted if place in all_places]
        assert len(of_weights) == len(places) == 14 + 6 * (model is EXPERTS) + fp8_output
        assert set(of_weights) == places


@pytest.mark.parametrize("scaling", Scaling)
def test_rounding_in_parts_gives_the_bits_of_rounding_at_once(
    scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.precision.fp8.FP8_ELEMENTS", 5 * INPUTS)
    weight = numbers(2, OUTPUTS, INPUTS)
    for matrix in (weight, weight.t()):
        whole, parts = rounded(matrix, FORWARD, scaling), rounded_in_parts(matrix, scaling)
        assert torch.equal(parts.values.float(), whole.values.float())
        assert torch.equal(parts.scale, whole.scale)


@pytest.mark.parametrize("scaling", EACH_SCALING)
def test_kept_weights_give_the_bits_of_weights_rounded_at_each_use(scaling: Scaling) -> None:
    weight = numbers(2, OUTPUTS, INPUTS).requires_grad_()
    grad = numbers(3, TOKENS, OUTPUTS)
    found = []
    for is_kept in (False, True):
        if is_kept:
            attach_rounded(weight, scaling)
            with torch.no_grad():
                round_weight_(weight, scaling)
        x = numbers(1, TOKENS, INPUTS).requires_grad_()
        out = Fp8Products(scaling).linear(x, weight)
        found.append((out, *torch.autograd.grad(out, (x, weight), grad)))
    for kept, anew in zip(*found, strict=True):
        assert torch.equal(kept, anew)


@pytest.mark.parametrize("scaling", Scaling)
def test_compiled_rounding_of_weights_gives_the_same_bits_in_few_graphs(scaling: Scaling) -> None:
    torch.compiler.reset()
    counters.clear()
    kinds = [[(64, 48), (64, 64)], [(128, 48), (96, 32), (1008, 64)], [(64, 48), (64, 64)]]
    blocks = {}
    for number, sizes in enumerate(kinds):
        block = nn.Module()
        weights = [numbers(number, *size).t().contiguous() for size in sizes]
        block.weights = nn.ParameterList(weights)
        block.forward = lambda: None
        blocks[block] = list(block.weights)
    rounded_weights = RoundedWeights(blocks, scaling, is_compiled=True)
    for block, weights in blocks.items():
        block()
        for weight in weights:
            found = [tensor.clone() for tensor in attached([weight])]
            with torch.no_grad():
                round_weight_(weight, scaling)
            for ours, expected in zip(found, attached([weight]), strict=True):
                assert torch.equal(ours.float(), expected.float())
    # By scales of rows there are graphs for any sizes, else one for each kind of block.
    most = 2 if scaling is Scaling.tensor else 4
    assert 1 <= counters["stats"]["unique_graphs"] <= most
    rounded_weights.close()
    torch.compiler.reset()


def test_what_is_eager_does_not_load_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes seconds, of a dry run too."""
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: made.append(function))
    block = nn.Linear(INPUTS, OUTPUTS)
    rounded_weights = RoundedWeights({block: [block.weight]}, Scaling.tensor)
    block(torch.ones(1, INPUTS))
    assert float(attached([block.weight])[1]) > 0
    assert not made
    rounded_weights.close()


def test_more_sizes_than_the_compiler_follows_by_itself_are_transposed_by_compiled_code() -> None:
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        for rows, dtype in ((16, FORWARD), (32, BACKWARD), (32, FORWARD)):
            values = numbers(rows, rows, 64).to(dtype)
            found = torch.empty(64, rows, dtype=dtype)
            turn_(values, found)
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8).t())
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def test_written_masters_are_rounded_again() -> None:
    training = built(config_of(PrecisionName.fp8))
    model = training.parallelized.model
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        before = model(tokens, tokens)
        for item in training.parallelized.trained:
            if "proj" in item.name:
                item.master.mul_(-1.5)
        assert torch.equal(model(tokens, tokens), before)
        training.parallelized.stage.copy_masters_to_parameters()
        assert not torch.equal(model(tokens, tokens), before)
        for item in training.parallelized.trained:
            copies = getattr(item.parameter, "fp8_values", None)
            if copies is not None:
                assert torch.equal(
                    copies.float(), rounded(item.parameter, FORWARD, Scaling.tensor).values.float()
                )


def test_a_rank_without_fp8_says_so_before_anything_is_built() -> None:
    with pytest.raises(TrainingError, match=r"compute capability 8\.9 .* use precision=bf16"):
        refuse_missing_hardware(config_of(PrecisionName.fp8), torch.device("cpu"))
    refuse_missing_hardware(config_of(PrecisionName.bf16), torch.device("cpu"))
