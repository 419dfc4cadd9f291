"""The order of ranks in the mesh, and batches that multiply out or are explained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import (
    BatchStage,
    Config,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from orchestra.errors import ConfigError
from orchestra.sizes.topology import (
    Coordinates,
    Layout,
    StepBatches,
    axis_links,
    batch_problems,
    batch_ramp,
    batch_shape,
    divisors,
    global_batch_size,
    largest_divisor,
    layout,
    listed,
    nearest_multiples,
    node_blocks,
    warmup_steps,
)
from orchestra.sizes.training_shape import open_micro_batch_sizes

degrees = st.integers(1, 4)


@given(dp=degrees, tp=degrees, pp=degrees, cp=degrees)
def test_ranks_and_coordinates_are_each_others_inverse(dp: int, tp: int, pp: int, cp: int) -> None:
    mesh = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size == dp * tp * pp * cp
    assert [mesh.rank(place) for place in places] == list(range(mesh.world_size))


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_stages_are_far_apart() -> None:
    mesh = Layout(dp=2, tp=4, pp=2, cp=2)
    assert [mesh.coordinates(rank).tp for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert mesh.coordinates(4) == Coordinates(dp=0, tp=0, pp=0, cp=1)
    assert mesh.coordinates(8) == Coordinates(dp=1, tp=0, pp=0, cp=0)
    assert mesh.coordinates(16) == Coordinates(dp=0, tp=0, pp=1, cp=0)

    for outside in (-1, 32):
        with pytest.raises(IndexError):
            mesh.coordinates(outside)
    with pytest.raises(IndexError):
        mesh.rank(Coordinates(dp=0, tp=4, pp=0, cp=0))


def test_auto_takes_what_the_other_axes_leave_and_zero_shards_over_it_unless_told_otherwise() -> None:
    assert layout(ParallelismConfig(tp=2, pp=2), 16) == Layout(dp=4, tp=2, pp=2)
    assert layout(ParallelismConfig(dp=4, cp=2), 8) == Layout(dp=4, cp=2)
    assert layout(ParallelismConfig(zero=1), 8) == Layout(dp=8, shard=8)
    assert layout(ParallelismConfig(zero=3, tp=2), 8) == Layout(dp=4, tp=2, shard=4)
    assert layout(ParallelismConfig(zero=2, shard_degree=4), 8) == Layout(dp=8, shard=4)


@given(dp=degrees, tp=degrees, pp=degrees, cp=degrees, per_node=st.sampled_from([1, 2, 3, 4, 5, 6, 8]))
def test_an_axis_uses_the_links_between_nodes_where_its_ranks_lie_on_several(
    dp: int, tp: int, pp: int, cp: int, per_node: int
) -> None:
    mesh = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    found = {link.axis: (link.degree, link.num_nodes) for link in axis_links(mesh, per_node)}
    axes = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",)}
    expected = {}
    for axis, names in axes.items():
        groups, placed = [], set[int]()
        for rank in range(mesh.world_size):
            if rank not in placed:
                groups.append(mesh.neighbours(rank, names))
                placed.update(groups[-1])
        if len(groups[0]) > 1:
            # Of 6 ranks a node every second group of 4 lies on two.
            nodes = max(len({rank // per_node for rank in ranks}) for ranks in groups)
            expected[axis] = (len(groups[0]), nodes)
    assert found == expected


@pytest.mark.parametrize(
    ("parallelism", "world_size", "words"),
    [
        (ParallelismConfig(tp=3), 8, ("does not divide", "multiple of 3")),
        (ParallelismConfig(dp=3), 8, ("parallelism.dp=3", "parallelism.dp=8 or auto")),
        (ParallelismConfig(ep=3), 8, ("parallelism.ep=3", "1, 2, 4 or 8")),
        (
            ParallelismConfig(zero=1, shard_degree=4),
            6,
            ("=4 does not divide dp=6", "1, 2, 3 or 6"),
        ),
        (ParallelismConfig(ep=2, zero=2, shard_degree=4), 6, ("does not divide dp=6; use 2 or 6",)),
        (
            ParallelismConfig(ep=4, zero=2, shard_degree=6),
            12,
            ("multiple of parallelism.ep=4", "use 4 or 12"),
        ),
        (ParallelismConfig(dp="many"), 8, ("parallelism.dp=many", "auto or a whole number")),
        (ParallelismConfig(pp=0), 8, ("parallelism.pp=0",)),
    ],
)
def test_layouts_that_do_not_multiply_out_are_explained(
    parallelism: ParallelismConfig, world_size: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(parallelism, world_size)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "nodes"),
    [
        # On nodes of four ranks: a pipeline stage, a shard group, the ranks that have all experts.
        (Layout(dp=64, pp=2, ep=8, shard=32), [16, 8, 2]),
        (Layout(dp=64, ep=8, shard=8), [16, 2]),
        (Layout(dp=64, ep=8), [16, 2]),
        (Layout(dp=16, cp=2, ep=4, shard=16), [8, 4, 2]),
        (Layout(dp=16, tp=2, shard=8), [8, 4]),
        (Layout(dp=6), []),
    ],
)
def test_groups_that_fill_whole_nodes_lie_inside_of_each_other(mesh: Layout, nodes: list[int]) -> None:
    assert node_blocks(mesh, 4) == nodes


@given(micro=st.integers(1, 8), accumulation=st.integers(1, 8), dp=st.integers(1, 8))
def test_a_batch_that_multiplies_out_gives_its_accumulation(micro: int, accumulation: int, dp: int) -> None:
    train = TrainConfig(global_batch_size=micro * accumulation * dp, micro_batch_size=micro, seq_len=32)
    shape = batch_shape(train, dp)
    assert (shape.micro_batch_size, shape.accumulation, shape.dp) == (micro, accumulation, dp)
    assert shape.tokens_per_step == micro * accumulation * dp * 32


@given(size=st.integers(1, 200), micro=st.integers(1, 16), dp=st.integers(1, 16))
def test_the_sizes_that_a_refusal_names_are_accepted(size: int, micro: int, dp: int) -> None:
    train = TrainConfig(global_batch_size=size, micro_batch_size=micro)
    if size % (micro * dp) == 0:
        return
    with pytest.raises(ConfigError, match="GBS = MBS × GA × DP"):
        batch_shape(train, dp)
    for near in nearest_multiples(size, micro * dp):
        accepted = TrainConfig(global_batch_size=near, micro_batch_size=micro)
        assert batch_shape(accepted, dp).global_batch_size == near


def test_a_refused_batch_names_what_fits_in_sequences_or_tokens() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=8 or 16, or micro_batch_size=3"):
        batch_shape(TrainConfig(global_batch_size=12, micro_batch_size=4), 2)
    train = TrainConfig(global_batch_size=16, global_batch_tokens=4096, seq_len=1024)
    assert batch_shape(train, 2).global_batch_size == 4
    with pytest.raises(ConfigError, match=r"_tokens=4096 \(4 sequences\).*use .*=3072 or 6144"):
        batch_shape(train, 3)


@pytest.mark.parametrize(("share", "micro"), [(1, 1), (6, 6), (8, 8), (12, 6), (16, 8), (22, 2)])
def test_without_a_configured_size_the_micro_batch_is_the_largest_divisor_up_to_8(
    share: int, micro: int
) -> None:
    shape = batch_shape(TrainConfig(global_batch_size=2 * share), 2)
    assert (shape.micro_batch_size, shape.accumulation) == (micro, share // micro)


def test_a_batch_that_nobody_configured_is_16_or_the_next_size_that_the_ranks_can_share() -> None:
    sizes = {dp: batch_shape(TrainConfig(), dp).global_batch_size for dp in (1, 2, 3, 4, 5, 6, 7, 8, 16, 64)}
    assert sizes == {1: 16, 2: 16, 3: 18, 4: 16, 5: 20, 6: 18, 7: 21, 8: 16, 16: 16, 64: 64}
    assert batch_shape(TrainConfig(micro_batch_size=3), 2).global_batch_size == 18
    assert global_batch_size(TrainConfig(micro_batch_size="auto"), 3) == 18


def test_absurd_batches_are_shared_out_or_refused_at_once() -> None:
    assert batch_shape(TrainConfig(global_batch_size=10**18), 2).micro_batch_size == 8
    prime = 2**89 - 1
    assert batch_shape(TrainConfig(global_batch_size=prime), 1).micro_batch_size == 1
    for micro in (2, 10**18):
        with pytest.raises(ConfigError, match=r"or micro_batch_size=1$"):
            batch_shape(TrainConfig(global_batch_size=prime, micro_batch_size=micro), 1)


@settings(max_examples=30)
@given(dp=degrees, cp=degrees, tp=st.integers(1, 2), pp=st.integers(1, 2), data=st.data())
def test_groups_of_axes_part_the_ranks_and_agree_on_their_members(
    dp: int, cp: int, tp: int, pp: int, data: st.DataObject
) -> None:
    shard = data.draw(st.sampled_from(divisors(dp * cp)))
    # A shard group without ZeRO has one rank, and else all experts.
    eps = [ep for ep in divisors(dp) if ep == 1 or shard == 1 or shard % (ep * cp) == 0]
    ep = data.draw(st.sampled_from(eps))
    mesh = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, shard=shard)
    assert mesh.replicate == dp * cp // shard
    same_experts = dp * cp // ep
    of_experts = {"expert_replicate": same_experts // mesh.expert_shard, "expert_shard": mesh.expert_shard}
    kinds = ({"replicate": mesh.replicate, "shard": shard}, {"dp": dp, "cp": cp}, {**of_experts, "ep": ep})
    parts = data.draw(st.sampled_from(kinds))
    degree = {**parts, "tp": tp, "pp": pp}
    axes = data.draw(st.lists(st.sampled_from(list(degree)), unique=True))
    for rank in range(mesh.world_size):
        members = mesh.neighbours(rank, axes)
        assert len(members) == math.prod(degree[axis] for axis in axes)
        assert list(members) == sorted(members)
        assert all(mesh.neighbours(other, axes) == members for other in members)
        assert rank in members


def test_a_shard_group_has_each_expert_once_over_its_ranks() -> None:
    mesh = Layout(dp=8, cp=2, ep=2, shard=8)
    for rank in range(mesh.world_size):
        group = mesh.neighbours(rank, ["shard"])
        assert mesh.neighbours(rank, ["ep", "expert_shard"]) == group
        of_experts = {
            (mesh.ep_index(place), mesh.expert_shard_index(place)) for place in map(mesh.coordinates, group)
        }
        assert of_experts == {(share, index) for share in range(2) for index in range(4)}


def test_shards_are_neighbours_behind_tp_and_replicas_are_far_apart() -> None:
    mesh = Layout(dp=4, tp=2, shard=2)
    assert mesh.neighbours(0, ["tp"]) == (0, 1)
    assert mesh.neighbours(0, ["shard"]) == (0, 2)
    assert mesh.neighbours(0, ["replicate"]) == (0, 4)
    assert mesh.neighbours(5, ["shard", "tp"]) == (4, 5, 6, 7)
    assert mesh.neighbours(5, ["replicate", "shard"]) == (1, 3, 5, 7)


def test_shards_are_the_ranks_of_a_sequence_before_those_of_other_samples() -> None:
    mesh = Layout(dp=4, tp=2, cp=2, shard=4)
    assert mesh.neighbours(0, ["cp"]) == (0, 2)
    assert mesh.neighbours(0, ["dp"]) == (0, 4, 8, 12)
    assert mesh.neighbours(0, ["shard"]) == (0, 2, 4, 6)
    assert mesh.neighbours(0, ["replicate"]) == (0, 8)


@given(number=st.integers(1, 5000), limit=st.integers(1, 60))
def test_the_largest_divisor_is_one_of_all_divisors(number: int, limit: int) -> None:
    assert largest_divisor(number, limit) == max(part for part in divisors(number) if part <= limit)


def test_divisors_of_an_absurd_number_are_found_at_once() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(2**89 - 1) == [1, 2**89 - 1]
    assert divisors(10**10) == sorted(2**twos * 5**fives for twos in range(11) for fives in range(11))


def test_warmup_is_a_tenth_of_the_run_up_to_2000_steps() -> None:
    lengths = {steps: warmup_steps(OptimConfig(), TrainConfig(steps=steps)) for steps in (1, 9, 300, 10**6)}
    assert lengths == {1: 0, 9: 0, 300: 30, 10**6: 2000}
    assert warmup_steps(OptimConfig(warmup_steps=7), TrainConfig(steps=300)) == 7


def test_an_open_micro_batch_is_chosen_from_what_the_layout_and_fp8_can_take() -> None:
    def sizes(precision: str = "bf16", dp: int = 2, noise: int | None = None, **degrees: int) -> list[int]:
        train = TrainConfig(
            seq_len=40, global_batch_size=24, micro_batch_size="auto", noise_scale_every=noise
        )
        config = Config(train=train, parallelism=ParallelismConfig(**degrees))
        name = PrecisionName(precision)
        return open_micro_batch_sizes(replace(config, precision=PrecisionConfig(name=name)), dp)

    assert sizes() == [1, 2, 3, 4, 6, 12]
    assert sizes(pp=2) == [1, 2, 3]
    assert sizes(dp=1, noise=5) == [1, 2, 3, 4, 6, 8, 12]
    # 16 divides 40 times an even number.
    assert sizes("fp8") == [2, 4, 6, 12]
    assert sizes("fp8", cp=2) == [4, 12]
    assert sizes("fp8", pp=4) == [2]
    assert sizes("fp8", dp=24) == []


def test_numbers_are_listed_in_words() -> None:
    assert listed([1]) == "1"
    assert listed([1, 2, 4]) == "1, 2 or 4"
    assert listed(list(range(20))) == "0, 1, 2, 3, 4, 5, …, 15, 16, 17, 18 or 19"


def test_of_a_ramp_only_batches_to_come_must_be_shared_out() -> None:
    # Steps 1 and 2, steps 3 and 4, and from 5 on; the third entry is over before a step begins in it.
    sizes, begins = (4, 6, 9, 12), (0, 8, 19, 20)
    stages = [BatchStage(8 * begin, 8 * size) for size, begin in zip(sizes, begins, strict=True)]
    train = TrainConfig(seq_len=8, steps=9, batch_ramp=stages)
    assert [stage.first_step for stage in batch_ramp(train).stages] == [1, 3, 5]

    def wrong(dp: int, from_step: int) -> list[int]:
        words = [words.partition("]")[0] for words in batch_problems(train, dp, from_step)]
        return [int(word.removeprefix("train.batch_ramp[")) for word in words]

    assert wrong(12, 0) == [0, 1, 2]
    assert [wrong(12, step) for step in (1, 2, 3, 4)] == [[0, 1], [1], [1], []]
    assert [wrong(3, step) for step in (1, 2)] == [[0], []]
    assert wrong(5, 100) == [3]
    # The micro-batch follows from the batches that can be shared out: on 3, 6 and 12 ranks 12 alone.
    two = replace(train, batch_ramp=[stages[0], stages[3]])
    assert [batch_shape(two, dp).micro_batch_size for dp in (1, 2, 3, 4, 6, 12)] == [4, 2, 4, 1, 2, 1]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    ends=st.lists(st.integers(1, 900), min_size=3, max_size=3, unique=True),
    steps=st.integers(1, 60),
)
def test_a_ramp_gives_each_step_the_batch_of_the_tokens_before_it(
    sizes: list[int], ends: list[int], steps: int
) -> None:
    seq_len, dp = 8, 2
    begins = [0, *sorted(ends)]
    stages = [
        BatchStage(begin, 2 * size * seq_len) for begin, size in zip(begins, sorted(sizes), strict=False)
    ]
    train = TrainConfig(seq_len=seq_len, steps=steps, batch_ramp=stages)
    ramp, batches, trained = batch_ramp(train), StepBatches(train, dp), 0
    for step in range(1, steps + 1):
        (*_, stage) = (stage for stage in stages if stage.tokens <= trained * seq_len)
        batch = batches.at(step)
        assert batch.tokens_per_step == stage.global_batch_tokens
        assert batch.micro_batch_size * batch.accumulation * dp == batch.global_batch_size
        assert batch.micro_batch_size == batches.last.micro_batch_size
        assert ramp.steps_through(trained + 1) == step
        trained += batch.global_batch_size
        assert ramp.sequences_through(step) == trained
        assert ramp.steps_through(trained) == step
    counts = ramp.num_steps(steps)
    assert sum(count for _, count in counts) == steps
    assert sum(count * stage.global_batch_size for stage, count in counts) == trained
