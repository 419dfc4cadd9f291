"""Sums up what is wrong with the members of a sweep: each sentence once, with the values it is about.

It knows no rule of a single run; `shared_places` holds those between the members of a sweep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter

from conf.schema import Config
from orchestra.config.keys import shown

# A screen's worth of different sentences, and of members behind one of them.
_MOST_SENTENCES = 12
_MOST_MEMBERS = 3
# What the members of a sweep have in common.
_COMMON = ("run.name", "run.dir", "run.metric")


class Findings:
    """Problems by the members that have them; `chosen` are the swept overrides of each member."""

    def __init__(self, chosen: Sequence[tuple[str, ...]], problems: Sequence[str]) -> None:
        self.chosen = chosen
        self._of_all = list(problems)
        # Members by problem, both in the order they were found.
        self._members: dict[str, list[int]] = {}

    def add(self, member: int, problems: Sequence[str]) -> None:
        """Note what is wrong with a member."""
        for problem in dict.fromkeys(problems):
            self._members.setdefault(problem, []).append(member)

    def about_all(self, problems: Iterator[str]) -> None:
        """Note what is wrong with the sweep as a whole."""
        self._of_all += problems

    def sentences(self) -> list[str]:
        """Return the problems for a person: a bounded number, each with the values it is about."""
        sentences = [*self._of_all, *(self._with_values(problem) for problem in self._members)]
        if len(sentences) <= _MOST_SENTENCES:
            return sentences
        more = len(sentences) - _MOST_SENTENCES
        return [*sentences[:_MOST_SENTENCES], f"and {more} more problem{'' if more == 1 else 's'}"]

    def _with_values(self, problem: str) -> str:
        members = self._members[problem]
        if len(members) == len(self.chosen):
            return problem
        common = [text for text in self.chosen[members[0]] if self._have(members, text)]
        # The values that decide, where every member with them has the problem.
        if common and self._number_with(common) == len(members):
            named = " ".join(common)
            said = re.search(rf"(?<![\w.]){re.escape(named)}(?![\w.])", problem)
            return problem if said else f"{problem} (with {named})"
        named = "; ".join(" ".join(self.chosen[member]) for member in members[:_MOST_MEMBERS])
        more = len(members) - _MOST_MEMBERS
        return f"{problem} (with {named}{f'; and {more} more' if more > 0 else ''})"

    def _have(self, members: Sequence[int], text: str) -> bool:
        return all(text in self.chosen[member] for member in members)

    def _number_with(self, texts: Sequence[str]) -> int:
        return sum(all(text in chosen for text in texts) for chosen in self.chosen)


def shared_places(configs: Sequence[Config]) -> Iterator[str]:
    """Yield a sentence for what the members of a sweep must have in common and have not, and the reverse."""
    for name in _COMMON:
        values = list(dict.fromkeys(attrgetter(name)(config) for config in configs))
        if len(values) > 1:
            yield (
                f"{name} is not the same for all members ({shown(values[0])}, {shown(values[1])}); a "
                f"sweep has one; leave it out of the presets that are swept"
            )
    seen: set[str] = set()
    for place in (config.checkpoint.dir for config in configs):
        if place is not None and place in seen:
            yield (
                f"checkpoint.dir={place} would be the place of several members, and each needs its own; "
                f"leave it out (checkpoints then lie in each member's directory), or write a value that is "
                f"swept into it, as in 'checkpoint.dir={place}/${{train.seed}}'"
            )
            return
        seen.add(place or "")
