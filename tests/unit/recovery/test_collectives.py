"""What torch's flight recorder has of each rank tells which of them a stalled collective waits for.

The records are in the form that torch 2.13 writes: JSON of gloo's as it was seen, and NCCL's from its source.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from orchestra.recovery.collectives import awaited, parsed, stalled_collectives
from orchestra.report.stalled import stalled_words
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.paths import RunDir

DONE, WAITS = ("completed", True), ("scheduled", False)
RUNS = ("started", False)


def entry(
    sequence: int,
    state: tuple[str, bool] = DONE,
    operation: str = "nccl:all_reduce",
    group: str = "5",
    size: int = 512,
) -> dict[str, Any]:
    name, is_retired = state
    return {
        "collective_seq_id": sequence,
        "input_dtypes": ["BFloat16"],
        "input_sizes": [[size, 4]],
        "is_p2p": False,
        "op_id": sequence,
        "pg_id": 1,
        "process_group": [group, "undefined"],
        "profiling_name": operation,
        "record_id": sequence,
        "retired": is_retired,
        "state": name,
        "time_created_ns": 1795573529004712061,
    }


def record(*entries: dict[str, Any], ranks: str = "[0, 1, 2]", axes: str | None = "dp") -> dict[str, Any]:
    groups = {} if axes is None else {"5": {"axes": axes, "ranks": json.loads(ranks)}}
    configs = {"5": {"name": "5", "desc": "undefined", "ranks": ranks}}
    return {"version": "2.10", "pg_config": configs, "entries": list(entries), "groups": groups}


def words_of(records: dict[int, dict[str, Any]], world_size: int = 3) -> list[str]:
    known = {rank: parsed(json.dumps(each).encode()) for rank, each in records.items()}
    return [stall.words() for stall in stalled_collectives(known, world_size)]


SEVENTEEN = "all_reduce 17 of group dp (3 ranks, bf16[512, 4])"
NOT_BEGUN = "not begun by the device of rank 2"


@pytest.mark.parametrize(
    ("records", "words"),
    [
        # The device of rank 2 has not begun: it is behind rank 1 too. Later ones were queued by then.
        (
            {
                0: record(entry(16), entry(17, RUNS), entry(18, WAITS)),
                1: record(entry(16)),
                2: record(entry(17, WAITS)),
            },
            f"rank 1 has not entered {SEVENTEEN}, the last one was 16; ranks 0, 2 wait there; {NOT_BEGUN}",
        ),
        (
            {0: record(entry(17, RUNS)), 1: record(), 2: record()},
            f"ranks 1, 2 have not entered {SEVENTEEN}, the last one was none; rank 0 waits there",
        ),
        # Stopped, or dead.
        ({0: record(entry(17, RUNS))}, f"{SEVENTEEN}: rank 0 waits there; ranks 1, 2 left no record"),
        (
            {rank: record(entry(17, RUNS)) for rank in range(3)},
            f"all ranks have entered {SEVENTEEN}, and it does not end: the network, or a device",
        ),
        # Ranks that disagree about what comes next: by the operation, or by its size.
        (
            {
                0: record(entry(17, RUNS)),
                1: record(entry(17, RUNS, "nccl:broadcast")),
                2: record(entry(17, RUNS)),
            },
            f"ranks 0, 2 are in {SEVENTEEN}, but rank 1 is in its broadcast 17 (bf16[512, 4])",
        ),
        (
            {0: record(entry(17, RUNS)), 1: record(entry(17, RUNS, size=4)), 2: record(entry(17, RUNS))},
            f"ranks 0, 2 are in {SEVENTEEN}, but rank 1 is in its all_reduce 17 (bf16[4, 4])",
        ),
        # gloo's are never more than scheduled; a retired one is over.
        (
            {
                0: record(entry(17, WAITS, "gloo:all_reduce")),
                1: record(entry(16, ("scheduled", True), "gloo:all_reduce")),
                2: record(entry(17, WAITS, "gloo:all_reduce")),
            },
            f"rank 1 has not entered {SEVENTEEN}, the last one was 16; ranks 0, 2 wait there",
        ),
    ],
)
def test_whom_a_stalled_collective_waits_for_is_named(records: dict[int, Any], words: str) -> None:
    assert words_of(records) == [words]


def awaited_in(records: dict[int, dict[str, Any]]) -> set[int]:
    known = {rank: parsed(json.dumps(each).encode()) for rank, each in records.items()}
    return set(awaited(known, 3))


def test_awaited_is_who_has_not_come_and_waits_for_nobody() -> None:
    waits = record(entry(16), entry(17, RUNS))
    assert awaited_in({0: waits, 1: record(entry(16)), 2: waits}) == {1}
    # One that left no record, as of a stopped process; but not beside one that says that it has not come.
    assert awaited_in({0: waits, 2: waits}) == {1}
    assert awaited_in({0: waits, 1: record(entry(16))}) == {1}
    # The device of one has not begun with what the others are in.
    assert awaited_in({0: waits, 1: record(entry(17, WAITS)), 2: waits}) == {1}
    # All are there: the network, or nothing is known.
    assert awaited_in(dict.fromkeys(range(3), waits)) == set()
    assert awaited_in(dict.fromkeys(range(3), record(entry(17, WAITS)))) == set()
    assert awaited_in({}) == set()
    # It waits for a message of one other rank, as between stages.
    message = {**entry(9, RUNS), "is_p2p": True}
    assert awaited_in({0: waits, 1: record(entry(16), message), 2: waits}) == set()


def test_what_is_over_or_was_sent_to_one_rank_stalls_nobody() -> None:
    sent = {**entry(9, RUNS), "is_p2p": True}
    assert words_of({rank: record(entry(17), sent) for rank in range(3)}) == []
    assert words_of({}) == []


def test_the_rank_that_waits_for_nobody_comes_first() -> None:
    """Ranks 0 and 1 share a layer, 0 and 2 gradients: rank 2 does not come, so 0 does not, and so 1 waits."""
    pairs = {"5": {"axes": "dp", "ranks": [0, 2]}, "4": {"axes": "tp", "ranks": [0, 1]}}
    records = {
        0: {**record(entry(17, RUNS), entry(3, group="4")), "groups": pairs},
        1: {**record(entry(4, RUNS, group="4")), "groups": pairs},
        2: {**record(entry(16)), "groups": pairs},
    }
    assert awaited_in(records) == {2}
    first, second = words_of(records)
    assert first.startswith("rank 2 has not entered all_reduce 17 of group dp (2 ranks, bf16[512, 4])")
    assert second.startswith("rank 0 has not entered all_reduce 4 of group tp (2 ranks, bf16[512, 4])")


class Evil:
    """What a pickle may hold: a call of anything, made when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_watchdogs_pickle_is_read_as_plain_values_only(tmp_path: Path) -> None:
    plain = record(entry(17, RUNS), axes=None)
    (stall,) = stalled_collectives(
        {0: parsed(pickle.dumps(plain, 2)), 1: parsed(pickle.dumps(record(axes=None)))}, 3
    )
    assert stall.words().startswith("rank 1 has not entered all_reduce 17 of group 5 (3 ranks, ")
    for damage in (Evil(tmp_path / "made"), {**plain, "more": Evil(tmp_path / "made")}):
        with pytest.raises(ValueError, match="may hold plain values only"):
            parsed(pickle.dumps(damage))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1]", b"\x80\x04", pickle.dumps([1]), b'{"entries": [{}]}']
)
def test_what_is_no_record_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any words will do
        parsed(content)


def test_records_count_where_ranks_hung_and_dumps_of_nccl_also_where_they_failed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", nodes=1, ranks_per_node=2)
    run.attempt_logs(0).mkdir(parents=True)
    ranks = "[0, 1]"
    for rank, own in enumerate((record(entry(17, RUNS), ranks=ranks), record(entry(16), ranks=ranks))):
        run.rank_collectives(0, rank).write_text(json.dumps(own))
    # Slow ranks that went on leave records too.
    assert stalled_words(run, read_events(run)) is None
    events.write("rank_failed", rank=0)
    assert stalled_words(run, read_events(run)) is None
    dump = record(entry(8, RUNS), ranks=ranks, axes=None)
    (run.attempt_logs(0) / "nccl-0").write_bytes(pickle.dumps(dump, 2))
    attempt, (words,) = stalled_words(run, read_events(run)) or (None, [""])
    assert (attempt, "all_reduce 8 of group 5" in words) == (0, True)
    events.write("hang_detected", rank=1)
    attempt, (words,) = stalled_words(run, read_events(run)) or (None, [""])
    assert words.startswith("rank 1 has not entered all_reduce 17 of group dp (2 ranks, bf16[512, 4])")
    run.rank_collectives(0, 1).write_text("torn")
    attempt, (words,) = stalled_words(run, read_events(run)) or (None, [""])
    assert words.endswith("rank 1 left no record")
