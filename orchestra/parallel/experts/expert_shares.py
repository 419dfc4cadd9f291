"""Which experts of a layer each rank of a group has, as evenly many as can be: neighbours, or whichever share
the tokens out evenly. Integers only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from orchestra.parallel.places import Cut

# Experts move where the busiest rank then has more than this share less to do. A plain judgement: moving them
# takes about as long as saving them, and what was measured between two saves is not what comes after.
LEAST_GAIN = 0.05
# So little above the mean nobody is brought down any further.
EVEN_ENOUGH = 0.01


@dataclass(frozen=True)
class ExpertShares:
    """How `num_experts` are shared out over `num_ranks` ranks, of which each has room for `padded`.

    `order` has the experts rank by rank and slot by slot; as it stands they are in their own order. How many
    a rank has follows from its number alone.
    """

    num_experts: int
    num_ranks: int
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(self.num_experts)))

    @property
    def padded(self) -> int:
        """Experts that there is room for on each rank: the last one is nobody's where a rank has one less."""
        return -(-self.num_experts // self.num_ranks)

    def cut(self, rank: int) -> Cut:
        """Return which experts a rank has where they are in their own order."""
        begin = self._begin(rank)
        return Cut(0, begin, self._begin(rank + 1) - begin, self.padded)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the experts of a rank, by their slots."""
        return self.order[self._begin(rank) : self._begin(rank + 1)]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Each expert's place in the room of all ranks: rank · padded + slot."""
        place = dict[int, int]()
        for rank in range(self.num_ranks):
            for slot, expert in enumerate(self.experts_of(rank)):
                place[expert] = rank * self.padded + slot
        return tuple(place[expert] for expert in range(self.num_experts))

    def largest_over_mean(self, tokens: Sequence[int]) -> float:
        """Return the tokens of the busiest rank over those of the mean one, for those of each expert."""
        total = sum(tokens)
        return max(self._loads(tokens)) * self.num_ranks / total if total else 1.0

    def evened(self, tokens: Sequence[int]) -> ExpertShares:
        """Return shares by which the busiest rank has fewer of the `tokens` of each expert, by more than
        LEAST_GAIN, else these ones.

        One expert of the busiest rank trades places with one of another rank, those two by which the busier
        of both has least then, and so on as long as that helps. That comes out as even as sharing all out
        anew, the longest processing time first, and moves fewer (16 of 128 experts on 8 ranks, not 109).
        """
        order, loads = list(self.order), self._loads(tokens)
        mean, before = sum(tokens) / self.num_ranks, max(loads)
        if mean >= (1 - LEAST_GAIN) * before:
            return self  # no shares could
        while max(loads) > (1 + EVEN_ENOUGH) * mean:
            trade = self._best_trade(order, loads, tokens)
            if trade is None:
                break
            giver, taker, here, there = trade
            difference = tokens[order[here]] - tokens[order[there]]
            loads[giver] -= difference
            loads[taker] += difference
            order[here], order[there] = order[there], order[here]
        if max(loads) >= (1 - LEAST_GAIN) * before:
            return self
        slots = (self._in_slots(rank, order) for rank in range(self.num_ranks))
        return replace(self, order=tuple(expert for of_rank in slots for expert in of_rank))

    def _in_slots(self, rank: int, order: Sequence[int]) -> list[int]:
        """Return a rank's experts of another order so that those that it has here keep their slots."""
        own, new = self.experts_of(rank), [order[at] for at in self._indices(rank)]
        coming = iter([expert for expert in new if expert not in own])
        return [expert if expert in new else next(coming) for expert in own]

    def _best_trade(
        self, order: Sequence[int], loads: Sequence[int], tokens: Sequence[int]
    ) -> tuple[int, int, int, int] | None:
        """Return the busiest rank, another one, and of each the index of an expert in the order that are to
        trade places; of equal ones the first. None where no trade helps.
        """
        giver = loads.index(max(loads))
        found, least = None, loads[giver]
        for taker in range(self.num_ranks):
            # What the giver is to have less of, at best: then both have the same.
            half = (loads[giver] - loads[taker]) / 2
            theirs = sorted((tokens[order[there]], there) for there in self._indices(taker))
            for here in self._indices(giver) if taker != giver else ():
                mine = tokens[order[here]]
                at = bisect_left(theirs, (mine - half,))
                for count, there in theirs[max(0, at - 1) : at + 1]:
                    busier = max(loads[giver] - mine + count, loads[taker] + mine - count)
                    if busier < least:
                        found, least = (giver, taker, here, there), busier
        return found

    def _loads(self, tokens: Sequence[int]) -> list[int]:
        return [sum(tokens[expert] for expert in self.experts_of(rank)) for rank in range(self.num_ranks)]

    def _indices(self, rank: int) -> range:
        """Where a rank's experts stand in the order."""
        return range(self._begin(rank), self._begin(rank + 1))

    def _begin(self, rank: int) -> int:
        return rank * self.num_experts // self.num_ranks
