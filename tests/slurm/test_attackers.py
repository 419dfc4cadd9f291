"""A run of two nodes while another user of its network does to it what such a user can."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix_oracle import losses
from sites import ROOT, TINY, Site, SubmittedRun

from orchestra.run.paths import RunDir
from slurm.cluster.hosts import enter
from tests.support import listening

pytestmark = pytest.mark.slow

STEPS = ("train.steps=240", "checkpoint.every_steps=10")
SLOW = "at_step: 1, rank: 0, fault: slow, seconds: 0.1"
SETTINGS = (
    *("cluster.nodes=2", "cluster.gpus_per_node=1", "recovery.memory_copy_every_steps=3"),
    # The last steps of the second attempt show nothing more.
    f"recovery.inject=[{{{SLOW}}}, {{{SLOW}, attempt: 1, steps: 160}}]",
)
PROGRAM = Path(__file__).with_name("attacker.py")
OPEN = 'umask "$0"; exec "$@"'


class Attacker:
    """The attacker on one host, and what it said so far."""

    def __init__(self, cluster: Site, host: str, log: Path, *modules: str) -> None:
        self.log = log
        with log.open("w") as out:
            command = [*enter(cluster.layout, host), sys.executable, str(PROGRAM)]
            command += [str(cluster.user.pw_gid), *modules]
            quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, text=True, env=quiet)

    def asked(self, **what: Any) -> None:
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def said(self, word: str) -> list[str]:
        lines = [line.partition(" ") for line in self.log.read_text().splitlines()]
        return [rest for first, _, rest in lines if first == word]


@pytest.fixture
def attacker_on(cluster: Site, tmp_path: Path) -> Iterator[Callable[..., Attacker]]:
    """Return a function that starts an attacker on a host; all end with the test."""
    with contextlib.ExitStack() as attackers:

        def start(host: str, *modules: str) -> Attacker:
            attacker = Attacker(cluster, host, tmp_path / f"attacker-{host}", *modules)
            attackers.callback(attacker.process.wait)
            attackers.callback(attacker.process.kill)
            # It ends with its input: killed is only what entered the host for it.
            assert attacker.process.stdin is not None
            attackers.callback(attacker.process.stdin.close)
            return attacker

        yield start


@pytest.mark.timeout(240)
def test_an_attacker_on_the_runs_network_costs_it_saves_and_nothing_else(
    cluster: Site, attacker_on: Callable[..., Attacker]
) -> None:
    whole = RunDir(cluster.runs / "alone")
    of_whole = (*TINY, *STEPS, "run.name=alone", "cluster.gpus_per_node=2")
    orchestra(cluster, "002", "run", *of_whole)
    *_, last = cluster.layout.nodes
    outside, beside = attacker_on(last, "torch"), {host: attacker_on(host) for host in ("node1", "node2")}
    for attacker in beside.values():
        attacker.asked(take=5000)
    of_run = (*TINY, *STEPS, *SETTINGS, "run.name=attacked", "--json")
    facts = json.loads(orchestra(cluster, "000", "submit", *of_run))
    run = SubmittedRun(cluster, RunDir(Path(facts["path"])), str(facts["job"]))
    run.wait_for_step(3)
    assert run.hosts() == [*beside]
    ports = {host: listening.addresses(run.agent_pid(host)) for host in run.hosts()}
    assert all(len(of_agent) >= 2 for of_agent in ports.values()), ports
    outside.asked(
        crowd=[(address, port) for of_agent in ports.values() for port, address in of_agent.items()]
    )
    (rank,) = run.rank_pids(run.hosts()[0])
    *_, (port, address) = listening.addresses(rank).items()
    outside.asked(store=(address, port))
    run.wait(lambda: outside.said("let-go"), "strangers are let go")
    run.wait(lambda: run.events("checkpoint_failed"), "a save fails")
    assert run.attempt() == 0, run.logs()

    # What an agent's end leaves free is taken, and who asks for its copies is answered.
    second = run.hosts()[1]
    ((address, *_), of_agent) = (list(ports[second].values()), list(ports[second]))
    beside[second].asked(pose=(address, of_agent), walk=[str(run.dir.path), str(whole.path)])
    run.hit_agent(1)
    run.wait_for_attempt(1)
    run.wait(lambda: len(beside[second].said("posing")) == len(of_agent), "the ports are taken")
    run.wait(lambda: beside[second].said("walked"), "its files are looked at")
    (walked,) = beside[second].said("walked")
    num_seen, _, open_to_others = walked.partition(" ")
    assert (int(num_seen) > 100, open_to_others) == (True, "[]")

    run.assert_job_ends("COMPLETED")
    reasons = str([event["reasons"] for event in run.events("checkpoint_failed")])
    assert "was not written by this attempt's ranks" in reasons
    assert len(run.events("attempt_started")) == 2, run.logs()
    assert losses(run.dir) == losses(whole)


def orchestra(cluster: Site, umask: str, *words: str) -> str:
    """Run our command as somebody who lets others write; return its standard output."""
    command = ("sh", "-c", OPEN, umask, sys.executable, "-m", "orchestra", *words)
    return cluster.run(*command, timeout_s=200, PYTHONPATH=str(ROOT)).stdout
