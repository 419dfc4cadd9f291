"""A run whose loss leaps goes back and leaves data out: it ends as if that data had never been there, and it
never goes back for ever. One whose devices disagree goes back and ends as if nothing had happened.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import (
    TINY,
    events_of,
    newest_manifest,
    orchestra,
    processes_of,
    trained_digest,
    trained_rows,
)
from test_unfit_nodes import train

from orchestra.data.ledger import read_ledger
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir
from orchestra.run.rollback import EVENT

NUM_STEPS, SPIKE_AT, TO, LEFT_OUT, BATCH = 40, 18, 10, (11, 22), 4
STEPS = (
    f"train.steps={NUM_STEPS}",
    "train.log_every=1",
    "checkpoint.every_steps=5",
    "checkpoint.async_save=false",
    "data.ledger=true",
    "cluster.gpus_per_node=2",
)
ROLLS_BACK = (
    "recovery.loss_spike.action=roll_back",
    "recovery.loss_spike.window=8",
    "recovery.roll_back.steps_before=6",
    f"recovery.roll_back.skip_steps={LEFT_OUT[1] - TO}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roll_back")


@pytest.fixture(scope="module")
def without_that_data(folder: Path) -> RunDir:
    """A run that leaves those steps out from its start: it fails in its first, and is then told so."""
    fault = "recovery.inject=[{at_step: 1, rank: 0, fault: exit}]"
    done = orchestra(folder, "run", "run.name=without", *TINY, *STEPS, fault, "recovery.max_restarts=0")
    assert done.returncode == 1, done.stdout + done.stderr
    run = RunDir(folder / "runs" / "without")
    first, last = LEFT_OUT
    places = [[(first - 1) * BATCH, last * BATCH]]
    EventWriter(run, "test", 0).write(EVENT, step=1, to=0, cause="told by a test", left_out=places)
    done = orchestra(folder, "resume", "without")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.parametrize("copies", ["null", "1"])
def test_a_run_that_went_back_ends_as_if_that_data_had_never_been_there(
    folder: Path, without_that_data: RunDir, copies: str
) -> None:
    name = f"copies-{copies}"
    # The second attempt is killed too: the third one leaves the same data out.
    faults = f"{{at_step: {SPIKE_AT}, rank: 1, fault: spike}},{{attempt: 1, at_step: 27, rank: 0}}"
    asked = (f"recovery.inject=[{faults}]", f"recovery.memory_copy_every_steps={copies}")
    done = orchestra(folder, "run", f"run.name={name}", *TINY, *STEPS, *ROLLS_BACK, *asked, limit_s=200)
    run = RunDir(folder / "runs" / name)
    assert done.returncode == 0, done.stdout + done.stderr
    (event,) = events_of(run, EVENT)
    assert (event["step"], event["to"], event["data_steps"]) == (SPIKE_AT, TO, [*LEFT_OUT])
    (back,) = events_of(run, "restored", 1)
    assert (back["step"], back["source"]) == (TO, "checkpoint")
    assert [it["step"] for it in events_of(run, "checkpoint_set_aside", 1)] == [15]
    ours, theirs = newest_manifest(run.checkpoints), newest_manifest(without_that_data.checkpoints)
    assert trained_digest(ours) == trained_digest(theirs)
    assert trained_rows(run) == trained_rows(without_that_data)
    _assert_each_sample_once(run, without_that_data)
    assert processes_of(run) == []
    told = orchestra(folder, "why", name).stdout
    assert "loss spike" in told
    assert f"it goes back to step {TO}" in told
    assert f"steps {LEFT_OUT[0]} to {LEFT_OUT[1]}" in " ".join(told.split())
    shown = " ".join(orchestra(folder, "status", name).stdout.split())
    assert f"1 roll-back: the data of steps {LEFT_OUT[0]} to {LEFT_OUT[1]} is left out" in shown


def test_whoever_resumes_it_elsewhere_leaves_the_same_data_out(
    folder: Path, without_that_data: RunDir
) -> None:
    spike = f"{{at_step: {SPIKE_AT}, rank: 1, fault: spike}}"
    kills = "{attempt: 1, at_step: 13, rank: 0},{attempt: 2, at_step: 14, rank: 1}"
    asked = (f"recovery.inject=[{spike},{kills}]", "recovery.max_restarts=1", "recovery.backoff_s=0.1")
    done = orchestra(folder, "run", "run.name=moved", *TINY, *STEPS, *ROLLS_BACK, *asked)
    assert done.returncode == 1, done.stdout + done.stderr
    done = orchestra(folder, "resume", "moved", "cluster.gpus_per_node=1")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(folder / "runs" / "moved")
    assert events_of(run, "restored", 3)[0]["step"] == TO
    ours, theirs = read_ledger(run), read_ledger(without_that_data)
    assert {step: sorted(ids) for step, ids in ours.items()} == {
        step: sorted(ids) for step, ids in theirs.items()
    }


def _assert_each_sample_once(run: RunDir, other: RunDir) -> None:
    ledger = read_ledger(run)
    assert ledger == read_ledger(other)
    assert sorted(ledger) == list(range(1, NUM_STEPS + 1))
    trained = [sample for step in ledger.values() for sample in step]
    assert len(trained) == NUM_STEPS * BATCH
    assert len(set(trained)) == len(trained)


def test_a_loss_that_stays_bad_ends_the_run_with_93(folder: Path) -> None:
    faults = ",".join(f"{{attempt: {it}, at_step: {SPIKE_AT - it}, rank: 1, fault: nan}}" for it in range(4))
    asked = (
        "train.on_nonfinite=roll_back",
        "train.max_nonfinite_steps=1",
        "recovery.roll_back.max_in_a_row=1",
        f"recovery.inject=[{faults}]",
    )
    done = orchestra(folder, "run", "run.name=bad", *TINY, *STEPS, *asked)
    assert done.returncode == 93, done.stdout + done.stderr
    assert "recovery.roll_back.max_in_a_row=1" in done.stdout + done.stderr
    (state,) = json.loads(orchestra(folder, "status", "bad", "--json").stdout)
    assert (state["state"], state["code"], state["attempts"]) == ("failed", 93, 2)


def test_a_flipped_bit_is_found_by_a_replay_and_costs_nothing_but_time(folder: Path) -> None:
    three = (*STEPS[:-1], "cluster.gpus_per_node=3", "train.global_batch_size=6")
    names = ("sound", "flipped")
    fault = "recovery.inject=[{at_step: 24, rank: 2, fault: flip}]"
    for name, asked in zip(names, ((), ("recovery.replay_every_steps=4", fault)), strict=True):
        done = orchestra(folder, "run", f"run.name={name}", *TINY, *three, *asked)
        assert done.returncode == 0, done.stdout + done.stderr
    sound, flipped = (RunDir(folder / "runs" / name) for name in names)
    (event,) = events_of(flipped, "replay_differs")
    assert (event["rank"], event["step"], event["is_settled"]) == (2, 24, True)
    # Up to step 20 a replay agreed.
    (restored,) = events_of(flipped, "restored")
    assert restored["step"] == 20
    assert trained_rows(flipped) == trained_rows(sound)
    digests = [trained_digest(newest_manifest(it.checkpoints)) for it in (sound, flipped)]
    assert digests[0] == digests[1]
    assert "broken device (rank 2" in " ".join(orchestra(folder, "why", "flipped").stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spare_takes_the_place_of_a_node_that_computed_wrongly(tmp_path: Path) -> None:
    asked = (
        *TINY,
        *("cluster.gpus_per_node=2", "train.steps=12"),
        # Saved behind its back step 6 is passed over while step 3 is still being written.
        *("checkpoint.every_steps=3", "checkpoint.async_save=false"),
        "recovery.replay_every_steps=3",
        "recovery.inject=[{at_step: 9, rank: 3, fault: flip}]",
    )
    run, _ = train(tmp_path / "runs", *asked, environments={})
    first, second = events_of(run, "attempt_started")
    assert first["hosts"] == ["node1", "node2"]
    assert second["hosts"] == ["node1", "node3"]
    (decided,) = events_of(run, "restarting")
    assert (decided["decision"], decided["rule"]) == ("replace", "broken_device")
    # A failure that somebody planned puts no host on the cluster's list.
    assert (decided["exclude"], decided["listed"]) == (["node2"], [])
    (restored,) = events_of(run, "restored")
    assert restored["step"] == 6
    assert events_of(run, "finished")
