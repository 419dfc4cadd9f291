"""Experts shared out over ranks: every layout is one process' training, and saves are the same on any."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mixture_trainings import (
    MIXTURE,
    Choices,
    MixtureTrained,
    constant_choices,
    mixed,
    trained_alone,
    trained_mixture,
)
from pool import Ranks
from small_trainings import (
    Trained,
    assert_equal_trainings,
    assert_same_bits,
    bytes_sent,
    joined,
    restore_and_go_on,
    save_and_go_on,
)

from conf.schema import Config, ModelConfig, Recompute
from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from tests.support.torch_features import NEEDS_OUTPUTS

IS_WHOLE = os.environ.get("ORCHESTRA_EQUIVALENCE") == "all"
STEPS = 20 if IS_WHOLE else 2
# An expert takes no more than its even share of a sequence's tokens.
TIGHT = replace(MIXTURE, moe_capacity_factor=1.0)
# Norms of queries and keys, and latent attention with a latent of queries and without.
NORMED = replace(MIXTURE, qk_norm=True)
LATENT = replace(
    MIXTURE,
    num_key_value_heads=4,
    kv_lora_rank=8,
    q_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
)
PLAIN_QUERIES = replace(LATENT, q_lora_rank=None)
# Experts and none that every token goes through.
ALONE = replace(LATENT, shared_expert_intermediate_size=0, first_k_dense_replace=0)

# Between them every degree meets every other one, every stage of ZeRO, and capacity.
OF_FOUR: tuple[Config, ...] = (
    mixed(dp=4, ep=4),
    mixed(TIGHT, dp=4, ep=2, zero=1),
    mixed(dp=4, ep=2, zero=2, accumulation=2),
    mixed(TIGHT, dp=4, ep=4, zero=3, accumulation=2),
    mixed(dp=4, ep=2, zero=3, accumulation=2, recompute="full"),
    mixed(dp=4, ep=2, zero=1, recompute="selective"),
    mixed(TIGHT, dp=2, ep=2, tp=2, sequence_parallel=True),
    mixed(NORMED, dp=2, ep=2, tp=2, sequence_parallel=True, zero=3, accumulation=2),
    mixed(LATENT, dp=2, ep=1, tp=2, zero=2),
    mixed(TIGHT, dp=2, ep=2, cp=2, zero=2, accumulation=2),
    mixed(PLAIN_QUERIES, dp=2, ep=2, cp=2, zero=3),
    mixed(LATENT, ep=1, tp=2, sequence_parallel=True, cp=2, zero=1),
    mixed(TIGHT, dp=2, ep=2, pp=2, zero=1, accumulation=2, schedule="zbv"),
    mixed(dp=2, ep=2, pp=2, zero=3, accumulation=4),
    mixed(NORMED, dp=2, ep=2, pp=2, accumulation=4, schedule="zero_bubble"),
    mixed(ep=1, tp=2, pp=2, accumulation=4, schedule="afab"),
    # Two replicas of two shards: one rank alone has its experts' part.
    mixed(TIGHT, dp=4, ep=2, zero=3, shard_degree=2, accumulation=2),
)
OF_EIGHT: tuple[Config, ...] = (
    mixed(TIGHT, dp=4, ep=4, pp=2, zero=2, accumulation=2),
    mixed(TIGHT, dp=2, ep=2, tp=2, cp=2, zero=1),
    mixed(dp=2, ep=2, pp=2, tp=2, sequence_parallel=True, zero=3, accumulation=2),
    # Two replicas of four shards, of which two have the same experts.
    mixed(dp=8, ep=2, zero=2, shard_degree=4),
    mixed(TIGHT, dp=4, ep=2, cp=2, zero=3, shard_degree=4, accumulation=2),
)
FIVE = replace(MIXTURE, num_experts=5)
OF_THREE = (mixed(FIVE, dp=3, ep=3, num_sequences=6), mixed(FIVE, dp=3, ep=3, num_sequences=6, zero=3))
# Sums over ranks are kept with their products: those of attention, of the shared expert and of the experts.
OF_TWO = (
    mixed(ep=1, tp=2, recompute="selective"),
    mixed(TIGHT, ep=1, tp=2, sequence_parallel=True, recompute="selective"),
    mixed(LATENT, ep=1, tp=2, zero=1, recompute="selective"),
    mixed(ALONE, ep=1, tp=2, sequence_parallel=True, accumulation=2, recompute="selective"),
)


@functools.cache
def reference(model: ModelConfig = MIXTURE, num_sequences: int = 8) -> MixtureTrained:
    """Train in one process, each batch in one pass, and write down who was chosen."""
    return trained_alone(mixed(model, num_sequences=num_sequences), STEPS)


def name_of(config: Config) -> str:
    shape = config.parallelism
    degrees = f"ep {shape.ep} zero {shape.zero} tp {shape.tp} cp {shape.cp} pp {shape.pp}"
    return f"{degrees} {shape.schedule.name} {config.train.recompute.name}: {config.model}"


def assert_same_mixture(found: Sequence[MixtureTrained], expected: MixtureTrained, config: Config) -> None:
    """Every gradient of the first step, all steps and the final state are those of one process."""
    name = name_of(config)
    gradients = joined([Trained([], of_rank.gradients) for of_rank in found])
    of_one = joined([Trained([], expected.gradients)])
    assert gradients.keys() == of_one.keys()
    for parameter, gradient in of_one.items():
        off = (gradients[parameter] - gradient).norm()
        assert off <= 1e-5 * gradient.norm(), f"{name}: {parameter} is {off / gradient.norm()} off"
    assert_equal_trainings(found, expected, name)
    assert all(of_rank.loads == expected.loads for of_rank in found), name


def bytes_of_exchanges(config: Config, choices: Choices) -> int:
    """Return the bytes of the rows that all ranks together send: there and back, in both passes."""
    shape, model = config.parallelism, config.model
    shares = ExpertShares(model.num_experts, shape.ep)
    owner = torch.cat([torch.full((shares.cut(rank).size,), rank) for rank in range(shape.ep)])
    dp, micro_batch_size = int(shape.dp), config.train.micro_batch_size
    assert isinstance(micro_batch_size, int)
    number = 0
    for chosen_BSK in choices.values():
        at_B = torch.arange(len(chosen_BSK)) // micro_batch_size % dp % shape.ep
        number += int((owner[chosen_BSK] != at_B[:, None, None]).sum())
    return 4 * number * model.hidden_size * 4 * shape.tp


def product(num_ranks: int) -> list[Config]:
    """Return every combination of the degrees and stages that so many ranks can do, dropless and not."""
    found = []
    for model, zero, tp, cp, pp, ep in itertools.product(
        (MIXTURE, TIGHT), range(4), (1, 2), (1, 2), (1, 2), (1, 2, 4)
    ):
        dp, rest = divmod(num_ranks, tp * cp * pp)
        if rest == 0 and dp > 0 and dp % ep == 0:
            degrees = {"tp": tp, "sequence_parallel": tp > 1, "cp": cp, "pp": pp, "ep": ep}
            found.append(mixed(model, dp=dp, zero=zero, accumulation=pp, **degrees))
    return found


def groups() -> Iterator[object]:
    """Yield what one test trains: on how many ranks, and how."""
    chosen: dict[int, Sequence[Config]] = {4: OF_FOUR, 8: OF_EIGHT, 3: OF_THREE, 2: OF_TWO}
    if IS_WHOLE:
        chosen |= {num: [*chosen[num], *product(num)] for num in (4, 8)}
    for num_ranks, configs in chosen.items():
        for begin in range(0, len(configs), 4):
            some = configs[begin : begin + 4]
            yield pytest.param(num_ranks, some, marks=[NEEDS_OUTPUTS] * any(map(keeps_sums, some)))


def keeps_sums(config: Config) -> bool:
    """Whether sums over the ranks of tensor parallelism are kept with their products."""
    return config.train.recompute is Recompute.selective and config.parallelism.tp > 1


@pytest.mark.parametrize(("num_ranks", "configs"), list(groups()))
def test_every_layout_is_the_same_training(ranks: Ranks, num_ranks: int, configs: Sequence[Config]) -> None:
    for config in configs:
        num_sequences = config.train.global_batch_size
        assert num_sequences is not None
        expected = reference(config.model, num_sequences)
        found = ranks(num_ranks).run(trained_mixture, config=config, choices=expected.choices, steps=STEPS)
        assert_same_mixture(found, expected, config)
        assert sum(of_rank.num_flips for of_rank in found) == 0, name_of(config)
        is_plain = config.model.moe_capacity_factor is None and config.train.recompute.name == "none"
        if is_plain and config.parallelism.ep > 1:
            sent = sum(of_rank.bytes_sent["all_to_all"] for of_rank in found)
            theory = bytes_of_exchanges(config, expected.choices)
            # What says how many rows come is in it too.
            assert theory < sent <= 1.02 * theory, name_of(config)


def test_experts_and_ranks_that_get_no_token(ranks: Ranks) -> None:
    choices = constant_choices([0, 1], STEPS)
    expected = trained_alone(mixed(), STEPS, choices)
    for config in (mixed(dp=4, ep=4, zero=3), mixed(dp=4, ep=2)):
        found = ranks(4).run(trained_mixture, config=config, choices=choices, steps=STEPS)
        assert_same_mixture(found, expected, config)


def test_without_replay_the_choices_are_those_of_one_process_and_of_the_run_before(ranks: Ranks) -> None:
    config = mixed(dp=4, ep=4, zero=2, accumulation=2)
    expected = reference()
    arguments = {"config": config, "choices": expected.choices, "steps": STEPS, "replays": False}
    found = ranks(4).run(trained_mixture, **arguments)
    assert sum(of_rank.num_flips for of_rank in found) <= 1e-5 * sum(each.num_choices for each in found)
    for row, row_expected in zip(found[0].rows, expected.rows, strict=True):
        assert row[0] == pytest.approx(row_expected[0], rel=1e-4)
    again = ranks(4).run(trained_mixture, **arguments)
    assert again[0].rows == found[0].rows
    assert_same_bits(again, found)


def test_zero_sends_experts_among_the_ranks_that_have_the_same_ones(ranks: Ranks) -> None:
    model = replace(MIXTURE, hidden_size=64, moe_intermediate_size=96, num_experts=8)
    config = mixed(model, dp=4, ep=2, zero=2, accumulation=2, bucket_mib=1.0)
    sent = ranks(4).run(bytes_sent, config=config)[0]
    experts = 3 * 3 * 64 * 96 * 8
    shapes = joined([Trained([], trained_alone(mixed(model), 1).gradients)])
    others = sum(gradient.numel() for gradient in shapes.values()) - experts
    of_pass = 4 * (others * 3 / 4 + experts / 2 * 1 / 2)
    assert sent["reduce_scatter"] == pytest.approx(2 * of_pass, rel=0.02)
    assert sent["all_gather"] == pytest.approx(of_pass, rel=0.02)


@NEEDS_OUTPUTS
def test_selective_recomputation_repeats_no_sum_over_ranks(ranks: Ranks) -> None:
    for model in (MIXTURE, ALONE):
        sent = [
            ranks(2).run(bytes_sent, config=mixed(model, ep=1, tp=2, recompute=kind))[0]
            for kind in ("none", "selective")
        ]
        assert sent[0] == sent[1]


def test_recomputation_repeats_exchanges_of_rows_and_asks_nobody_twice(ranks: Ranks) -> None:
    choices = reference().choices
    found = {}
    for name, config in (
        ("all_to_all", mixed(dp=2, ep=2)),
        ("all_reduce", mixed(replace(TIGHT, first_k_dense_replace=3), ep=1, cp=2)),
    ):
        for kind in ("none", "full", "selective"):
            how = replace(config, train=replace(config.train, recompute=Recompute(kind)))
            of_ranks = ranks(2).run(trained_mixture, config=how, choices=choices, steps=STEPS)
            found[name, kind] = sum(of_rank.bytes_sent[name] for of_rank in of_ranks)
    there_and_back = bytes_of_exchanges(mixed(dp=2, ep=2), choices) // 2
    for kind in ("full", "selective"):
        assert found["all_to_all", kind] == found["all_to_all", "none"] + there_and_back
        assert found["all_reduce", kind] == found["all_reduce", "none"]


def has_own_group(rank: int, world: int) -> bool:
    """Return whether tokens meet nobody else's collectives, where the same ranks are data-parallel."""
    mesh = make_mesh(rank, Layout(dp=world, ep=world), torch.device("cpu"))
    assert mesh.ep_group is not None
    members = dist.get_process_group_ranks(mesh.ep_group)
    is_own = mesh.ep_group not in (mesh.dp_group, mesh.loss_group, dist.group.WORLD)
    dist.destroy_process_group(mesh.ep_group)
    return is_own and members == list(range(world))


def test_tokens_travel_over_a_group_of_their_own(ranks: Ranks) -> None:
    assert ranks(2).run(has_own_group) == [True, True]


def test_a_save_is_the_same_on_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    saved = mixed(dp=4, ep=4, zero=1, precision="bf16")
    rows, state = zip(*ranks(4).run(save_and_go_on, config=saved, place=tmp_path), strict=True)
    again = ranks(4).run(restore_and_go_on, config=saved, place=tmp_path, topic="same")
    assert [found[:2] for found in again] == list(zip(rows, state, strict=True))
    others = (
        (4, mixed(dp=4, ep=2, zero=3, precision="bf16")),
        (4, mixed(dp=4, ep=2, zero=2, shard_degree=2, precision="bf16")),
        (4, mixed(dp=2, ep=2, tp=2, sequence_parallel=True, precision="bf16")),
        (4, mixed(dp=2, ep=2, pp=2, zero=2, accumulation=2, precision="bf16")),
        (1, mixed(precision="bf16")),
    )
    for number, (size, config) in enumerate(others):
        found = ranks(size).run(restore_and_go_on, config=config, place=tmp_path, topic=f"other {number}")
        for of_rank in found:
            # What was restored there and saved again is what was saved here.
            assert of_rank[2] == of_rank[3] == again[0][2]
            for row, expected in zip(of_rank[0], rows[0], strict=True):
                assert row[0] == pytest.approx(expected[0], rel=2e-3)
