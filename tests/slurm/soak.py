"""A run with faults at random for half an hour, which must end as if nothing had happened.

`python tests/slurm/soak.py --seconds 1800 --seed 7` (`make soak`): faults are a Poisson process (a mean of
60 s between two) to ranks, agents and nodes, the first one too, at whatever phase the run is in; lost nodes
come back later. Then the run is left alone, and what it ends with is held to the oracle of the fault matrix.
`--at-once 2` hits two nodes in the same moment each time, in ways drawn apart. Each fault and each recovery
is printed, and the accounts at the end. It needs root and Slurm's packages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from matrix_oracle import References, accounts, differences, left_over
from sites import Site, SubmittedRun, opened_at

NODES, SPARES, HOSTS = 2, 1, 4
# A fault that comes before the run made any progress since the last one is due like any other: a run that is
# hit more often than it can save would end by the policy's rules, so that the mean is not made much shorter.
MEAN_S = 60.0
_HEALED_AFTER_S = 25.0
# A step waits, as a host waits for its device: what else is done on these few cores does not slow it.
_STEP_WAITS = "recovery.inject=[{{at_step: 1, rank: all, fault: slow, seconds: {:g}, attempt: all}}]"
_TRAINS_WITHIN_S = 240.0
_POLL_S = 0.2


@dataclass
class Soak:
    """One run with its faults. `down`: hosts without power, and when they come back."""

    run: SubmittedRun
    chance: random.Random
    at_once: int = 1
    down: dict[str, float] = field(default_factory=dict)
    num_faults: int = 0

    def inject_for(self, seconds: float, mean_s: float) -> None:
        """Inject faults for so long. Raises TooLateError where it does not come back."""
        end = time.monotonic() + seconds
        due = time.monotonic() + self.chance.expovariate(1 / mean_s)
        heard = time.monotonic()
        step = self.run.step()
        while time.monotonic() < end:
            self._heal(time.monotonic())
            if self.run.step() != step:
                step, heard = self.run.step(), time.monotonic()
            if time.monotonic() - heard > _TRAINS_WITHIN_S:
                self.run.wait(lambda: False, f"no step for {_TRAINS_WITHIN_S:g} s after {step}", 0)
            if time.monotonic() >= due:
                if self.run.is_finished():
                    write_line("it has finished before its time: give --seconds or --step less")
                    return
                self._hit()
                due = time.monotonic() + self.chance.expovariate(1 / mean_s)
            time.sleep(_POLL_S)

    def heal_all(self) -> None:
        self._heal(float("inf"))

    def _heal(self, now: float) -> None:
        for host in [host for host, at in self.down.items() if at <= now]:
            self.run.site.heal(host)
            del self.down[host]
            write_line(f"{host} is back")

    def _hit(self) -> None:
        """Do one of five things to each of some nodes of the attempt that is on, if there is one."""
        if self.run.attempt() < 0:
            return
        hosts = self.run.hosts()
        for node in self.chance.sample(range(len(hosts)), min(self.at_once, len(hosts))):
            self._hit_node(node, hosts[node])

    def _hit_node(self, node: int, host: str) -> None:
        what, do = self.chance.choice(FAULTS)
        is_loss = do is SubmittedRun.fail_node
        if is_loss and len(self.down) >= HOSTS - NODES - SPARES:
            what, do, is_loss = "rank gets SIGKILL", SubmittedRun.hit_rank, False
        if host in self.down:
            return
        # The victim may have ended by itself, or not have begun.
        with contextlib.suppress(IndexError, ValueError, ProcessLookupError):
            do(self.run, node)
            self.num_faults += 1
            write_line(f"step {self.run.step()}, attempt {self.run.attempt()}: {what} on {host}")
        if is_loss:
            self.down[host] = time.monotonic() + _HEALED_AFTER_S


FAULTS: tuple[tuple[str, Callable[[SubmittedRun, int], object]], ...] = (
    ("rank gets SIGKILL", SubmittedRun.hit_rank),
    ("rank gets SIGKILL", SubmittedRun.hit_rank),
    ("rank gets SIGSTOP", partial(SubmittedRun.hit_rank, number=signal.SIGSTOP)),
    ("agent gets SIGKILL", SubmittedRun.hit_agent),
    ("node loses power", SubmittedRun.fail_node),
)


def main() -> int:
    """Run it, print all that happens and the accounts; 1 where the run did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800, help="how long there are faults (%(default)s)")
    parser.add_argument("--mean", type=float, default=MEAN_S, help="seconds between two (%(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="nodes that a fault hits (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="chosen and printed where it is not given")
    parser.add_argument("--step", type=float, default=0.05, help="seconds that a step waits (%(default)s)")
    parser.add_argument("overrides", nargs="*", help="of the run, such as parallelism.zero=3")
    parser.add_argument("--folder", type=Path, help="keep cluster and runs there; else all is removed")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    write_line(f"seed {seed}, {arguments.seconds:g} s, a fault every {arguments.mean:g} s")
    with opened_at(arguments.folder, HOSTS) as site:
        return soak(site, arguments, seed)


def soak(site: Site, arguments: argparse.Namespace, seed: int) -> int:
    """Soak one run and hold it to the oracle; return the exit code."""
    # As many as fill the time if nothing happens, a tenth beyond the wait each: the run outlives the faults.
    steps = max(200, int(arguments.seconds / (1.1 * arguments.step)))
    waits = _STEP_WAITS.format(arguments.step)
    saved = ("checkpoint.every_steps=10", "train.log_every=10", "data.ledger=true")
    length = (f"train.steps={steps}", *saved, *arguments.overrides)
    quick = ("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=1")
    more = ("recovery.heartbeat_timeout_s=8", "recovery.exclude_hours=0", f"cluster.nodes={NODES}", waits)
    site.clear()
    name = f"soak-{seed}-{time.time_ns() // 1_000_000}"
    run = site.submit_run(name, *length, *quick, *more, f"cluster.spare_nodes={SPARES}")
    soaked = Soak(run, random.Random(seed), arguments.at_once)
    # Beside it, in what time the run leaves: a run has its nodes for itself, and goodput is the run's.
    # Niceness is a thread's on Linux, and its children's.
    aside = ThreadPoolExecutor(1, initializer=os.nice, initargs=(19,))
    reference = References(site, length, "soak", timeout_s=3 * arguments.seconds + 600)
    alone = aside.submit(reference.of, NODES)
    try:
        run.wait_for_step(5)
        soaked.inject_for(arguments.seconds, arguments.mean)
        soaked.heal_all()
        write_line(f"{soaked.num_faults} faults; from step {run.step()} on it is left alone")
        run.wait(lambda: run.is_finished() or run.is_over(), "it ends", 2 * arguments.seconds + 300)
    except AssertionError as error:
        write_line(f"FAILED: {error}")
        return 1
    wrong = differences(run.dir, alone.result(), site) + left_over(run)
    _write_recoveries(run)
    write_line(
        f"FAILED: {'; '.join(wrong)}"
        if wrong
        else "passed: losses, state and samples are those of a run left alone"
    )
    return int(bool(wrong))


def _write_recoveries(run: SubmittedRun) -> None:
    for event in run.events("restarting", "requeued", "node_replaced", "hang_detected"):
        facts = {key: event[key] for key in ("decision", "reason", "how", "by_host") if event.get(key)}
        write_line(f"attempt {event['attempt']} {event['event']}: {facts}")
    booked, wall_s = accounts(run.dir)
    for name, seconds in booked.to_json().items():
        write_line(f"{name}: {seconds:.3f}" if isinstance(seconds, float) else f"{name}: {seconds}")
    write_line(f"{run.attempt() + 1} attempts in {wall_s:.0f} s")


def write_line(words: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
