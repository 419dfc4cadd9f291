"""The nodes of a simulated run: who trains, who waits as a spare, who is broken, what the next job gets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

from orchestra.plan.failures.scenario import Repairs, Scenario


class Nodes:
    """The hosts of one allocation after another. Whoever left one does not come back into it."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._chance = random.Random(f"nodes {seed}")
        self._numbers = itertools.count(1)
        self._away_until: list[float] = []
        self.hosts: tuple[str, ...] = ()
        self.spares: tuple[str, ...] = ()
        # In use though broken: nothing has shown it yet.
        self.broken: set[str] = set()

    def allocate(self) -> None:
        """Take the hosts of a new job: as many as wanted, and the spares."""
        scenario = self._scenario
        self.hosts = tuple(self._names(scenario.num_nodes))
        self.spares = tuple(self._names(scenario.spare_nodes))
        self.broken = set()

    def at(self, place: int, num_nodes: int = 1) -> tuple[str, ...]:
        """Return the hosts behind the switch of this place; those of them that train."""
        first = place // num_nodes * num_nodes
        return self.hosts[first : first + num_nodes]

    def leave(self, hosts: Collection[str], time: float) -> None:
        """Send hosts that are broken away for their repair."""
        for _ in hosts:
            self._away_until.append(time + repair_s(self._scenario.repairs, self._chance))
        self.broken.difference_update(hosts)

    def wait_s(self, time: float) -> float:
        """Return how long a job that is submitted now waits: for the scheduler, and for enough nodes."""
        scenario = self._scenario
        mean_s = scenario.queue_wait_s
        queue_s = self._chance.expovariate(1 / mean_s) if mean_s > 0 else 0.0
        if scenario.cluster_nodes is None:
            return queue_s
        # What is broken and was not found out comes back with the others.
        away = sorted(until for until in self._away_until if until > time + queue_s)
        self._away_until = away
        missing = scenario.num_nodes + scenario.spare_nodes - (scenario.cluster_nodes - len(away))
        return queue_s if missing <= 0 else max(queue_s, away[min(missing, len(away)) - 1] - time)

    def without(self, out: Collection[str]) -> tuple[str, ...]:
        """Return the hosts that train, less some of them; quick where these are few."""
        hosts = self.hosts
        for host in out:
            if host in hosts:
                place = hosts.index(host)
                hosts = hosts[:place] + hosts[place + 1 :]
        return hosts

    def go_on(self, out: Collection[str]) -> list[int]:
        """Go on without the hosts in `out`, each other one in its place and spares for those; return the
        places that were filled. Without enough spares the later ones move up.
        """
        self.spares = tuple(host for host in self.spares if host not in out)
        hosts, filled = list(self.hosts), []
        places = sorted(hosts.index(host) for host in out if host in self.hosts)
        gone = len(places)
        missing = self._scenario.num_nodes - (len(hosts) - gone)
        stepping_in, self.spares = self.spares[:missing], self.spares[missing:]
        for place, host in zip(places, stepping_in, strict=False):
            hosts[place] = host
            filled.append(place)
        for place in reversed(places[len(filled) :]):
            del hosts[place]
        self.hosts = (*hosts, *stepping_in[gone:])
        return filled

    def _names(self, count: int) -> list[str]:
        return [f"node{next(self._numbers)}" for _ in range(count)]


def repair_s(repairs: Repairs, chance: random.Random) -> float:
    """Draw how long one repair takes."""
    mean_s = repairs.slow_s if chance.random() < repairs.slow_share else repairs.usual_s
    return chance.expovariate(1 / mean_s)
