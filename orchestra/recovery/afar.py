"""Which ranks hold up a run over several nodes, from what each node reports of its own. Pure.

A rank never goes back within an attempt: what was last reported of it is the least that it has come to.
So whoever stands no further than the last word of all others is the one that they wait for, however late
their words came. Only its own word must be true now: whoever moves reports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestra.recovery.culprit import Standing
from orchestra.recovery.limits import History, LimitRules, limit

# The network itself may be away, and whom that catches behind the others waits for it as they do: only a
# process that is stopped is known to be at fault. TCP doubles the wait before each new try (RFC 6298, 5.5):
# what was cut off for a while is silent for at most twice as long.
_OF_A_NETWORK = 2.0


def hung_afar(
    standings: Sequence[Standing], world_size: int, history: History, rules: LimitRules
) -> list[tuple[Standing, float]]:
    """Return the ranks that all others wait for, each with the limit that it is beyond.

    Empty until the positions of all `world_size` ranks are known. `history` is that of any rank: steps take
    all of them the same time.
    """
    if len({it.rank for it in standings}) < world_size:
        return []
    least = min(it.position for it in standings)
    behind = [it for it in standings if it.position == least]
    found = []
    for it in behind:
        limit_s = limit(it.phase, history, rules, is_last=True)
        if not it.is_stopped:
            limit_s = max(limit_s, min(_OF_A_NETWORK * limit_s, rules.silent_s))
        if it.silent_s > limit_s:
            found.append((it, limit_s))
    return found
