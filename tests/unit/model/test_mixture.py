"""A mixture of experts: who is chosen, what is computed, what is left out, what is counted and evened out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from conf.schema import MoeAuxScope, MoeBalance, Recompute, ScoringFunc
from orchestra.model.initial import NormalSlice, fill_normal_slices_
from orchestra.model.mixture.balance import updated_bias
from orchestra.model.mixture.experts import Experts
from orchestra.model.mixture.mixture import Mixture
from orchestra.model.transformer import (
    Block,
    Transformer,
    fill_initial_parts_,
    fill_initial_values,
    initial_std,
)
from orchestra.model.weight_gradients import LaterGradients, WeightGradient, attach
from orchestra.parallel.blocks import recomputed
from tests.support.reference_llama import small

MODEL = small(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, num_hidden_layers=2)
BATCH, SEQUENCE = 3, 16


def filled(mixture: Mixture, seed: int = 0) -> Mixture:
    for number, parameter in enumerate(mixture.parameters()):
        fill_normal_slices_(
            [NormalSlice(parameter.data, 100 * seed + number, parameter.shape, [0] * parameter.dim(), 0.2)]
        )
    return mixture


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(BATCH, SEQUENCE, MODEL.hidden_size, generator=generator).to(dtype)


def plain(mixture: Mixture, x_BSE: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the mixture's output token by token; a choice of no expert adds nothing."""
    rows = []
    for x_E, experts, weights in zip(x_BSE.flatten(0, 1), experts_TK, weights_TK, strict=True):
        total = torch.zeros_like(x_E)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert < mixture.num_experts:
                gate, up = mixture.experts.gate_proj[expert], mixture.experts.up_proj[expert]
                inner = silu(linear(x_E, gate)) * linear(x_E, up)
                total = total + weight * linear(inner, mixture.experts.down_proj[expert])
        rows.append(total)
    return torch.stack(rows).view_as(x_BSE)


def gradients(output: Tensor, mixture: Mixture, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), [x, *mixture.parameters()]))


@pytest.mark.parametrize("factor", [None, 0.75])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_output_and_gradients_are_those_of_each_token_by_itself(
    factor: float | None, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_grouped:  # the kernel that a GPU takes
        monkeypatch.setattr(Experts, "_has_kernel", True)
    mixture = filled(Mixture(replace(MODEL, moe_capacity_factor=factor)))
    # One expert that nobody chooses.
    bias = mixture.gate.e_score_correction_bias
    assert bias is not None
    bias[3] = -1e3
    x = hidden().requires_grad_()
    routing = mixture.gate(x.flatten(0, 1))
    assert not (routing.experts_TK == 3).any()
    taken = routing.experts_TK
    num_dropped = 0
    if factor is not None:
        taken = taken.clone()
        most = -(-int(factor * SEQUENCE * 2) // 5)
        for sequence in taken.view(BATCH, -1):
            seen = [0] * 5
            for place, expert in enumerate(sequence.tolist()):
                if seen[expert] >= most:
                    sequence[place], num_dropped = 5, num_dropped + 1
                seen[expert] += 1
        assert num_dropped > 3
    expected = plain(mixture, x, taken, routing.weights_TK)
    found = mixture(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    pairs = zip(gradients(found, mixture, x), gradients(expected, mixture, x), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    counts = torch.bincount(routing.experts_TK.flatten(), minlength=5)
    assert torch.equal(mixture.balance.tokens_per_expert, counts)
    assert mixture.balance.dropped == num_dropped


def test_gradients_of_experts_are_exact() -> None:
    experts = Experts(small(hidden_size=4, moe_intermediate_size=3, num_experts=3)).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def output(*tensors: Tensor) -> Tensor:
        names = [name for name, _ in experts.named_parameters()]
        swapped = dict(zip(names, tensors[1:], strict=True))
        found: Tensor = torch.func.functional_call(experts, swapped, (tensors[0], torch.tensor([2, 0, 3])))
        return found

    assert torch.autograd.gradcheck(output, (rows, *experts.parameters()))


@pytest.mark.parametrize(("is_grouped", "is_compiled"), [(False, False), (True, False), (True, True)])
def test_gradients_of_experts_are_made_when_they_are_taken(
    is_grouped: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule may take them later. One expert has no row, and two rows are nobody's."""
    monkeypatch.setattr(Experts, "_has_kernel", is_grouped)
    experts, counts = Experts(small(num_experts=4, moe_intermediate_size=24)), torch.tensor([5, 0, 9, 2])
    # Compilers know the kernel for this type only.
    dtype = torch.bfloat16 if is_grouped else torch.float32
    experts.to(dtype)
    for number, parameter in enumerate(experts.parameters()):
        fill_normal_slices_(
            [NormalSlice(parameter.data, number, parameter.shape, [0] * parameter.dim(), 0.2)]
        )
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(18, MODEL.hidden_size, generator=generator).to(dtype).requires_grad_()
    call = torch.compile(experts, backend="aot_eager") if is_compiled else experts

    def backward(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        made = call(rows, counts)[:16]
        (made * torch.linspace(-1, 1, made.numel()).view_as(made)).sum().backward()
        assert rows.grad is not None
        grad, rows.grad = rows.grad[:16], None
        return grad

    of_rows = backward(experts)
    of_weights = [parameter.grad for parameter in experts.parameters()]
    later, memory = LaterGradients(), [torch.zeros_like(weight) for weight in experts.parameters()]
    takers = [WeightGradient(lambda into=into: (into, False), lambda: None, later) for into in memory]
    for parameter, taker in zip(experts.parameters(), takers, strict=True):
        parameter.grad = None
        attach(parameter, taker)
    for is_later in (False, True):
        for into in memory:
            into.fill_(7)
        later.is_open = is_later
        torch.testing.assert_close(backward(call), of_rows)
        if is_later:
            assert all(bool((into == 7).all()) for into in memory)
        with torch.no_grad():
            for take in later.kept():
                take()
        assert all(parameter.grad is None for parameter in experts.parameters())
        torch.testing.assert_close(memory, of_weights)


def test_passes_repeat_bit_for_bit() -> None:
    mixture = filled(Mixture(MODEL))
    x = hidden(torch.bfloat16).requires_grad_()
    mixture.to(torch.bfloat16)
    outputs = [mixture(x) for _ in range(2)]
    first, second = (gradients(output, mixture, x) for output in outputs)
    assert torch.equal(*outputs)
    assert all(map(torch.equal, first, second))


def test_a_router_computes_in_fp32_whatever_it_is_given() -> None:
    router = filled(Mixture(MODEL)).gate.to(torch.bfloat16)
    routing = router(hidden(torch.bfloat16).flatten(0, 1))
    wide = filled(Mixture(MODEL)).gate
    wide.weight.data = router.weight.data.float()
    expected = wide(hidden(torch.bfloat16).float().flatten(0, 1))
    assert routing.scores_TX.dtype is torch.float32
    assert torch.equal(routing.scores_TX, expected.scores_TX)
    assert torch.equal(routing.experts_TK, expected.experts_TK)


def test_a_bias_chooses_and_weighs_nothing() -> None:
    router = filled(Mixture(MODEL)).gate
    x = hidden().flatten(0, 1)
    before = router(x)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[4] = 10.0
    after = router(x)
    assert (after.experts_TK == 4).any(dim=1).all()
    assert torch.equal(after.scores_TX, before.scores_TX)
    chosen = after.scores_TX.gather(1, after.experts_TK)
    torch.testing.assert_close(after.weights_TK, chosen / chosen.sum(1, keepdim=True))


def test_experts_come_from_the_groups_that_are_allowed() -> None:
    model = replace(
        MODEL,
        num_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        scoring_func=ScoringFunc.sigmoid,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
    )
    routing = filled(Mixture(model)).gate(hidden().flatten(0, 1))
    scores = routing.scores_TX
    for token, experts in enumerate(routing.experts_TK.tolist()):
        of_group = scores[token].view(4, 3).topk(2).values.sum(1)
        allowed = of_group.topk(2).indices.tolist()
        best = [it for it in scores[token].argsort(descending=True).tolist() if it // 3 in allowed][:3]
        assert experts == best
    torch.testing.assert_close(routing.weights_TK, 2.5 * scores.gather(1, routing.experts_TK))


def test_the_choice_can_be_given() -> None:
    mixture = filled(Mixture(MODEL))
    given = torch.tensor([[0, 1]]).repeat(BATCH * SEQUENCE, 1)
    seen: list[Tensor] = []

    def replay(own: Tensor) -> Tensor:
        seen.append(own)
        return given

    mixture.gate.replay = replay
    mixture(hidden())
    assert mixture.balance.tokens_per_expert.tolist() == [BATCH * SEQUENCE] * 2 + [0] * 3
    assert len(seen) == 1


@pytest.mark.parametrize("scope", list(MoeAuxScope))
def test_injected_gradients_are_those_of_the_losses(scope: MoeAuxScope) -> None:
    model = replace(
        MODEL,
        moe_balance=MoeBalance.aux,
        router_aux_loss_coef=3.0,
        moe_aux_scope=scope,
        router_z_loss_coef=0.02,
        num_experts_per_tok=2,
    )
    mixture, share = filled(Mixture(model)), 0.5
    mixture.balance.loss_share.fill_(share)
    x = hidden().requires_grad_()
    found = gradients(mixture(x), mixture, x)

    quiet = filled(
        Mixture(
            replace(model, moe_balance=MoeBalance.none, router_aux_loss_coef=None, router_z_loss_coef=0.0)
        )
    )
    output = quiet(x)
    routing = quiet.gate(x.flatten(0, 1))
    groups = BATCH if scope is MoeAuxScope.sequence else 1
    loss = torch.zeros(())
    for scores, experts in zip(
        routing.scores_TX.chunk(groups), routing.experts_TK.chunk(groups), strict=True
    ):
        even = torch.bincount(experts.flatten(), minlength=5) * 5 / experts.numel()
        loss = loss + 3.0 * (even * scores.mean(0)).sum() * len(scores)
    loss = loss + 0.02 * routing.logits_TX.logsumexp(1).square().sum()
    of_losses = torch.autograd.grad(share * loss, [x, quiet.gate.weight])
    expected = gradients(output, quiet, x)
    expected[0] = expected[0] + of_losses[0]
    expected[1] = expected[1] + of_losses[1]
    assert float(of_losses[1].norm()) > 1e-2 * float(expected[1].norm())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_bias_grows_where_few_tokens_come_and_stays_centred() -> None:
    bias = updated_bias(torch.tensor([0.5, -0.5, 0.0, 0.0]), torch.tensor([10, 0, 2, 0]), 0.01)
    assert bias.sum().abs() < 1e-7
    change = bias - torch.tensor([0.5, -0.5, 0.0, 0.0])
    # Three below the mean, one above: steps of 0.01, less their mean.
    torch.testing.assert_close(change, torch.tensor([-0.015, 0.005, 0.005, 0.005]))


@pytest.mark.parametrize("kind", [Recompute.selective, Recompute.full])
@pytest.mark.parametrize("shared", [0, 24])
def test_recomputation_changes_nothing_and_counts_no_token_twice(kind: Recompute, shared: int) -> None:
    model = replace(
        MODEL,
        shared_expert_intermediate_size=shared,
        moe_balance=MoeBalance.aux,
        moe_capacity_factor=1.0,
    )
    found = {}
    for way in (Recompute.none, kind):
        block = Block(model, 0)
        for number, parameter in enumerate(block.parameters()):
            fill_normal_slices_(
                [NormalSlice(parameter.data, number, parameter.shape, [0] * parameter.dim(), 0.1)]
            )
        block.mlp.balance.loss_share.fill_(0.1)
        forward: Any = block if way is Recompute.none else recomputed(block, way)
        rotary = (torch.ones(SEQUENCE, 1, 8), torch.zeros(SEQUENCE, 1, 4))
        x = hidden().requires_grad_()
        output = forward(x, rotary)
        grads = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
        counters = (block.mlp.balance.tokens_per_expert, block.mlp.balance.dropped)
        found[way] = [output, *grads, *counters, block.mlp.balance.statistics]
    assert found[kind][-3].sum() == BATCH * SEQUENCE * 2
    for ours, theirs in zip(found[kind], found[Recompute.none], strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_counted_without_gradients() -> None:
    mixture = filled(Mixture(MODEL))
    with torch.no_grad():
        mixture(hidden())
    assert not mixture.balance.tokens_per_expert.any()


def test_first_layers_are_dense_and_a_part_of_stacked_values_is_that_of_all() -> None:
    model = Transformer(replace(MODEL, first_k_dense_replace=1, shared_expert_intermediate_size=8))
    fill_initial_values(model, seed=7)
    assert model.get_parameter("layers.0.mlp.gate_proj.weight").shape == (100, 48)
    name = "layers.1.mlp.experts.down_proj"
    whole = model.get_parameter(name)
    assert float(whole.detach().std()) == pytest.approx(initial_std(model.config, name), rel=0.05)
    assert initial_std(model.config, name) == pytest.approx(0.2 / 2)
    part = torch.empty(2, 7, 20)
    fill_initial_parts_([(part, name, whole.shape, (3, 11, 0))], model, 7)
    assert torch.equal(part, whole[3:, 11:18])


def test_compiled_blocks_equal_eager_ones() -> None:
    """Traced by the compiler's front end; the back end gets operators that it does not look into."""
    model = replace(MODEL, moe_balance=MoeBalance.aux, shared_expert_intermediate_size=24)
    found = []
    for is_compiled in (False, True):
        block = Block(model, 0)
        for number, parameter in enumerate(block.parameters()):
            fill_normal_slices_(
                [NormalSlice(parameter.data, number, parameter.shape, [0] * parameter.dim(), 0.1)]
            )
        block.mlp.balance.loss_share.fill_(0.1)
        forward: Any = recomputed(block, Recompute.full, is_one_graph=True) if is_compiled else block
        if is_compiled:
            forward = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=False)
        rotary = (torch.ones(SEQUENCE, 1, 8), torch.zeros(SEQUENCE, 1, 4))
        x = hidden().requires_grad_()
        for _ in range(2):
            output = forward(x, rotary)
            grads = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
        found.append([output, *grads, block.mlp.balance.tokens_per_expert, block.mlp.balance.statistics])
    assert found[0][-2].sum() == 2 * BATCH * SEQUENCE * 2
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)
