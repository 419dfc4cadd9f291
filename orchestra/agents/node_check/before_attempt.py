"""The leader's part in the preflight: waits for the nodes' looks, chooses the first nodes, writes it down.

What the nodes found stands in what they say of themselves, so that another agent can lead at any time. What
it means is `orchestra.agents.choose_nodes`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from launchers.node_group import Member
from orchestra.agents import choose_nodes
from orchestra.agents.choose_nodes import doubts, have_looked, preferred, slow, words_of, write_findings
from orchestra.agents.context import Station
from orchestra.errors import EXIT_FAILED
from orchestra.recovery.policy import Action, Decision
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record

_RULE = "nodes_unfit"
# Jobs in a row that may end before their attempt because of nodes: what all nodes lack is no node's fault.
MOST_MOVES = 3


class Preflight:
    """What the leader knows of its nodes before an attempt."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._all_there_since: float | None = None
        self._listed: Mapping[str, str] | None = None

    def is_over(self, members: Mapping[int, Member]) -> bool:
        """Tell whether the nodes that came have looked at themselves, or are waited for no longer."""
        now = time.monotonic()
        self._all_there_since = self._all_there_since or now
        return have_looked(members, self._station.crew.num_nodes, now - self._all_there_since)

    def first_nodes(self, members: Mapping[int, Member]) -> tuple[int, ...] | None:
        """Return the nodes of a job's first attempt, in the scheduler's order; None: they are too few."""
        config = self._station.config
        bad = choose_nodes.excluded_hosts(read_events(self._station.run), self._station.surroundings.facts())
        fit = [node for node, it in sorted(members.items()) if choose_nodes.is_fit(it) and it.host not in bad]
        return preferred(
            fit,
            config.cluster.nodes,
            slow(members),
            doubts(members, self.listed),
            lambda nodes: choose_nodes.shrunk(nodes, config),
        )

    def tell(self, events: EventWriter, members: Mapping[int, Member], taken: Sequence[int]) -> None:
        """Write down and say what was found; of sound nodes one event alone."""
        write_findings(events, members, self.listed, taken)
        for words in words_of(members, self.listed, taken):
            self._station.say(words)

    def go_elsewhere(self, members: Mapping[int, Member]) -> str | None:
        """Let the run go on in another job without the nodes that are unfit; return what was done, None where
        that is not to be: nobody is, no job may follow, or several before this one did no better.

        Raises LauncherError, LaunchError and OSError.
        """
        station = self._station
        unfit = tuple(it.host for it in members.values() if not choose_nodes.is_fit(it))
        events = read_events(station.run)
        if not unfit or not station.surroundings.can_requeue or moves(events, _RULE) >= MOST_MOVES:
            return None
        attempt = max((int(event["attempt"]) for event in events), default=0)
        writer = EventWriter(station.run, f"crew.{station.crew.folder.name}", attempt)
        write_findings(writer, members, self.listed, taken=())
        words = self.unfit_words(members)
        decision = Decision(Action.requeue, EXIT_FAILED, words, rule=_RULE, exclude=unfit)
        try:
            return station.surroundings.requeue(decision, attempt, writer)
        finally:
            writer.close()

    def unfit_words(self, members: Mapping[int, Member]) -> str:
        """Return which nodes cannot train, and why; empty where all can."""
        found = [f"{it.host}: {it.facts['unfit']}" for it in members.values() if not choose_nodes.is_fit(it)]
        return "; ".join(found)

    @property
    def listed(self) -> Mapping[str, str]:
        """Hosts on the cluster's list, and why; read once for a start of a job."""
        if self._listed is None:
            self._listed = self._station.surroundings.excluded()
        return self._listed


def moves(events: Iterable[Record], rule: str, since: str = "attempt_started") -> int:
    """Return how often the run was moved to another job by a rule since the last event of a kind."""
    count = 0
    for event in events:
        if event["event"] == since:
            count = 0
        count += event["event"] == "requeued" and event.get("rule") == rule
    return count
