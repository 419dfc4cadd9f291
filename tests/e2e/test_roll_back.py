"""A run whose loss leaps goes back and leaves data out: it ends as if that data had never been there, and it
never goes back for ever. One whose devices disagree goes back and ends as if nothing had happened.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import (
    TINY,
    assert_same_training,
    events_of,
    orchestra,
    printed,
    processes_of,
    state_of,
    train,
)

from orchestra.data.order import read_ledger
from orchestra.run.events import EventWriter, read_events
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
def without_that_data(folder: Path) -> RunDir:
    """A run that leaves those steps out from its start: it fails in its first, and is then told so."""
    fault = "recovery.inject=[{at_step: 1, rank: 0, fault: exit}]"
    run = train(folder, "without", *TINY, *STEPS, fault, "recovery.max_restarts=0", code=1)
    first, last = LEFT_OUT
    places = [[(first - 1) * BATCH, last * BATCH]]
    EventWriter(run, "test", 0).write(EVENT, step=1, to=0, cause="told by a test", left_out=places)
    orchestra(folder, "resume", "without")
    return run


def test_a_run_that_went_back_ends_as_if_that_data_had_never_been_there(
    folder: Path, without_that_data: RunDir
) -> None:
    name = "back"
    # The second attempt is killed too: the third one leaves the same data out.
    faults = f"{{at_step: {SPIKE_AT}, rank: 1, fault: spike}},{{attempt: 1, at_step: 27, rank: 0}}"
    # Copies in memory are of steps that do not count any more.
    overrides = (f"recovery.inject=[{faults}]", "recovery.memory_copy_every_steps=1")
    run = train(folder, name, *TINY, *STEPS, *ROLLS_BACK, *overrides, limit_s=200)
    (event,) = events_of(run, EVENT)
    assert (event["step"], event["to"], event["data_steps"]) == (SPIKE_AT, TO, [*LEFT_OUT])
    (back,) = events_of(run, "restored", 1)
    assert (back["step"], back["source"]) == (TO, "checkpoint")
    assert [15, 0] in back["later_checkpoints"]
    assert_same_training(run, without_that_data)
    ledger = read_ledger(run)
    assert ledger == read_ledger(without_that_data)
    assert sorted(ledger) == list(range(1, NUM_STEPS + 1))
    trained = [sample for step in ledger.values() for sample in step]
    assert NUM_STEPS * BATCH == len(trained) == len(set(trained)), "each sample once"
    assert processes_of(run) == []
    steps = f"steps {LEFT_OUT[0]} to {LEFT_OUT[1]}"
    why = printed(folder, "why", name)
    assert all(words in why for words in ("loss spike", f"it goes back to step {TO}", steps))
    assert f"1 roll-back: the data of {steps} is left out" in printed(folder, "status", name)
    # Whoever asks by name is spared the files that hold no such events.
    told = read_events(run)
    for kind in {event["event"] for event in told}:
        assert [e for e in read_events(run, (kind,)) if e["event"] == kind] == [
            e for e in told if e["event"] == kind
        ]


def test_whoever_resumes_it_elsewhere_leaves_the_same_data_out(
    folder: Path, without_that_data: RunDir
) -> None:
    spike = f"{{at_step: {SPIKE_AT}, rank: 1, fault: spike}}"
    kills = "{attempt: 1, at_step: 13, rank: 0},{attempt: 2, at_step: 14, rank: 1}"
    overrides = (f"recovery.inject=[{spike},{kills}]", "recovery.max_restarts=1", "recovery.backoff_s=0.1")
    run = train(folder, "moved", *TINY, *STEPS, *ROLLS_BACK, *overrides, code=1)
    orchestra(folder, "resume", "moved", "cluster.gpus_per_node=1")
    assert events_of(run, "restored", 3)[0]["step"] == TO
    ours, theirs = read_ledger(run), read_ledger(without_that_data)
    assert {step: sorted(ids) for step, ids in ours.items()} == {
        step: sorted(ids) for step, ids in theirs.items()
    }


def test_a_loss_that_stays_bad_ends_the_run_with_93(folder: Path) -> None:
    faults = ",".join(f"{{attempt: {n}, at_step: {SPIKE_AT - n}, rank: 1, fault: nan}}" for n in range(4))
    overrides = (
        "train.on_nonfinite=roll_back",
        "train.max_nonfinite_steps=1",
        "recovery.roll_back.max_in_a_row=1",
        f"recovery.inject=[{faults}]",
    )
    done = orchestra(folder, "run", "run.name=bad", *TINY, *STEPS, *overrides, code=93)
    assert "recovery.roll_back.max_in_a_row=1" in done.stdout + done.stderr
    state = state_of(folder, "bad")
    assert (state["state"], state["code"], state["attempts"]) == ("failed", 93, 2)


def test_a_flipped_bit_is_found_by_a_replay_and_costs_nothing_but_time(folder: Path) -> None:
    three = (*STEPS[:-1], "cluster.gpus_per_node=3", "train.global_batch_size=6")
    fault = "recovery.inject=[{at_step: 24, rank: 2, fault: flip}]"
    sound = train(folder, "sound", *TINY, *three)
    flipped = train(folder, "flipped", *TINY, *three, "recovery.replay_every_steps=4", fault)
    (event,) = events_of(flipped, "replay_differs")
    assert (event["rank"], event["step"], event["is_settled"]) == (2, 24, True)
    # Up to step 20 a replay agreed.
    (restored,) = events_of(flipped, "restored")
    assert restored["step"] == 20
    assert_same_training(flipped, sound)
    assert "broken device (rank 2" in printed(folder, "why", "flipped")
