"""What others on a machine can do to a run: its sockets, and words written into its ranks' store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PACE, TINY, assert_same_training, environment, events_of, processes_of, start_run, train

from tests.support import listening

_SETTINGS = (*TINY, "train.steps=80", "checkpoint.every_steps=5", "checkpoint.keep_last=2")

# As another user: writes over all words of saves in the ranks' store, until it is killed.
_ATTACK = """
import contextlib, os, sys, time
from datetime import timedelta
from torch.distributed import TCPStore

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print("ready", flush=True)
port = int(sys.stdin.readline())
limit = timedelta(seconds=30)
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
print("reached", flush=True)
while True:
    with contextlib.suppress(Exception):
        keys = [key for key in store.list_keys() if "attempt-" in key]
        attempt = keys[0].partition("/")[0]
        for key in keys:
            if "/save/" in key:
                store.set(key, '{"reasons": {}, "bytes": 1}')
        for number in range(40):
            store.set(f"{attempt}/save/{number}/turn/answer", "false")
    time.sleep(0.002)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it becomes another user")
def test_a_stranger_who_writes_into_the_ranks_store_costs_saves_and_nothing_else(folder: Path) -> None:
    undisturbed = train(folder, "undisturbed", *_SETTINGS)
    stranger = subprocess.Popen(
        [sys.executable, "-c", _ATTACK],
        env=environment({"TORCH_CPP_LOG_LEVEL": "FATAL"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        trial = start_run(folder, "disturbed", *_SETTINGS, PACE)
        trial.wait_for_steps(2)
        found = [listening.addresses(pid) for pid in processes_of(trial.run)]
        assert {address for of_process in found for address in of_process.values()} == {"127.0.0.1"}
        # torchrun and rank 1 listen at one port each. Others than a store would keep their caller waiting.
        *_, port = next(of_process for of_process in found if len(of_process) == 2)
        print(port, file=stranger.stdin, flush=True)
        assert stranger.stdout.readline() == "reached\n"
        trial.wait_for(lambda: events_of(trial.run, "checkpoint_failed"))
    finally:
        stranger.kill()
    trial.end(0)
    reasons = str([event["reasons"] for event in events_of(trial.run, "checkpoint_failed")])
    assert "was not written by this attempt's ranks" in reasons
    assert len(events_of(trial.run, "attempt_started")) == 1
    assert_same_training(trial.run, undisturbed)
