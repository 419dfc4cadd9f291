"""Which rank has which experts: as many as before, fewer tokens at the busiest rank, the same again."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from orchestra.parallel.experts import move_experts
from orchestra.parallel.experts.expert_shares import LEAST_GAIN, ExpertShares
from orchestra.parallel.experts.move_experts import Holder, rounds_of_pieces
from orchestra.parallel.zero.buffers import lay_out


def uneven(seed: int) -> tuple[ExpertShares, list[int]]:
    """Return shares in any order, and tokens of which some experts get most."""
    dice = random.Random(seed)
    num_ranks = dice.randint(2, 6)
    num_experts = dice.randint(num_ranks, 24)
    order = dice.sample(range(num_experts), num_experts)
    tokens = [int(1000 * dice.random() ** 4) for _ in order]
    return ExpertShares(num_experts, num_ranks, tuple(order)), tokens


@pytest.mark.parametrize("seed", range(40))
def test_experts_are_shared_out_so_that_the_busiest_rank_has_less_or_stay(seed: int) -> None:
    shares, tokens = uneven(seed)
    found = shares.evened(tokens)
    before, after = shares.largest_over_mean(tokens), found.largest_over_mean(tokens)
    assert found == shares or after <= (1 - LEAST_GAIN) * before + 1e-9
    assert found == shares.evened(tokens)
    # Not again and again.
    assert found.evened(tokens) == found
    assert sorted(found.order) == list(range(shares.num_experts))
    assert sorted(found.places) == sorted(shares.places)
    for rank in range(shares.num_ranks):
        old, new = shares.experts_of(rank), found.experts_of(rank)
        assert len(old) == len(new) == shares.cut(rank).size
        staying = set(old) & set(new)
        assert all((one in staying) <= (one == other) for one, other in zip(old, new, strict=True))


def test_hot_experts_of_one_rank_are_parted_and_even_ones_stay() -> None:
    shares = ExpertShares(8, 4)
    hot = shares.evened([90, 90, 10, 10, 10, 10, 10, 10])
    assert [sorted(hot.experts_of(rank))[:1] for rank in range(2)] == [[1], [0]]
    assert hot.largest_over_mean([90, 90, 10, 10, 10, 10, 10, 10]) == pytest.approx(100 / 60)
    assert shares.evened([10, 11, 10, 10, 10, 10, 11, 10]) is shares
    assert shares.evened([0] * 8) is shares
    # One expert is more than a rank's share: nothing would be gained.
    assert shares.evened([100, 1, 1, 1, 1, 1, 1, 1]) is shares


@pytest.mark.parametrize("most", [move_experts.ROUND_ELEMENTS, 60, 1])
@pytest.mark.parametrize("num_ranges", [1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_rounds_of_pieces_bring_each_element_of_what_moves_to_its_place(
    seed: int, num_ranges: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_experts, "ROUND_ELEMENTS", most)
    old, _ = uneven(seed)
    new = ExpertShares(old.num_experts, old.num_ranks)
    length = 23
    layout = lay_out([("first", 70), ("experts", old.padded * length), ("last", 50)], num_ranges)
    member = layout.members[1]

    def filled(shares: ExpertShares) -> dict[tuple[int, int], tuple[int, int]]:
        """Return which element of which expert lies where: by share and element of its parameter."""
        return {
            (place // old.padded, place % old.padded * length + element): (expert, element)
            for expert, place in enumerate(shares.places)
            for element in range(length)
        }

    has = filled(old)
    for pieces in rounds_of_pieces(layout, member, old, new):
        sent, received = Counter[Holder](), Counter[Holder]()
        arriving = {}
        for piece in pieces:
            sent[piece.source] += piece.size
            received[piece.target] += piece.size
            for holder, begin in ((piece.source, piece.begin), (piece.target, piece.end)):
                start, stop = layout.part_of(member, holder.range)
                assert start <= begin < begin + piece.size <= stop
            for at in range(piece.size):
                to = piece.target.share, piece.end + at
                assert to not in arriving
                arriving[to] = has[piece.source.share, piece.begin + at]
        has.update(arriving)
        # One element of each expert at least.
        assert max([*sent.values(), *received.values()]) <= max(most, old.padded)
    assert has == filled(new)


def test_what_stays_is_in_no_round() -> None:
    shares = ExpertShares(4, 2)
    layout = lay_out([("experts", 4)], 1)
    assert list(rounds_of_pieces(layout, layout.members[0], shares, shares)) == []
    (pieces,) = rounds_of_pieces(layout, layout.members[0], shares, ExpertShares(4, 2, (2, 1, 0, 3)))
    assert [(piece.begin, piece.end, piece.size) for piece in pieces] == [(0, 0, 2), (0, 0, 2)]
