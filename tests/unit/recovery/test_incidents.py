"""Events become incidents: kind, cause, host and steps, and what is left open where nobody wrote it down."""

from __future__ import annotations

from typing import Any

import pytest
from incident_logs import TRACEBACK, Log

from orchestra.recovery import history
from orchestra.recovery.incidents import BROKEN_PEER, Incident, Kind, fingerprint, incidents
from orchestra.run.rollback import BROKEN_DEVICE


def last(log: Log) -> Incident:
    return incidents(history.read(log.events))[-1]


def test_an_error_is_told_with_its_place_in_our_code_and_blames_no_host() -> None:
    found = last(Log().start(0).fail(0).end(0))
    assert (found.kind, found.cause) == (Kind.rank_failed, "ValueError in train/step.py:run")
    assert (found.rank, found.host, found.blamed) == (3, "node2", ())
    assert (found.step, found.step_is_exact, found.before_first_step) == (150, True, False)


def test_a_cause_holds_nothing_that_changes_from_time_to_time() -> None:
    other = TRACEBACK.replace("70123", "5").replace("line 41", "line 44").replace("/somewhere", "/elsewhere")
    texts = {
        fingerprint({"cause": "ValueError", "message": str(number), "traceback": text, "pid": number})
        for number, text in enumerate((TRACEBACK, other))
    }
    assert len(texts) == 1
    assert fingerprint({"cause": "handle 0x7ff1 of process 12"}) == "handle # of process #"
    assert fingerprint({"cause": "exit code 7"}) != fingerprint({"cause": "exit code 8"})


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("[..gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:31337", BROKEN_PEER),
        ("NCCL communicator was aborted on rank 3", BROKEN_PEER),
        ("CUDA error: uncorrectable ECC error encountered", BROKEN_DEVICE),
        ("CUDA error: device-side assert triggered", "RuntimeError"),
    ],
)
def test_words_of_broken_peers_and_devices_are_known(message: str, cause: str) -> None:
    assert fingerprint({"cause": "RuntimeError", "message": message}) == cause


def test_a_broken_device_speaks_against_its_host() -> None:
    found = last(Log().start(0).fail(0, message="CUDA error: uncorrectable ECC error encountered").end(0))
    assert (found.cause, found.blamed) == (BROKEN_DEVICE, ("node2",))


def test_who_lost_a_connection_is_not_whom_it_was_about() -> None:
    log = Log().start(0).fail(0, rank=0, host="node1", message="Connection closed by peer", step=31)
    found = last(log.fail(0, rank=5, host="node3", step=31).end(0))
    assert (found.rank, found.host, found.cause) == (5, "node3", "ValueError in train/step.py:run")


def test_a_killed_rank_speaks_against_its_host_unless_it_was_the_only_one() -> None:
    found = last(Log().start(0).fail(0, rank=0, message="Connection reset", step=31).kill(0).end(0))
    assert (found.cause, found.blamed) == ("killed by SIGKILL", ("node2",))
    assert (found.step, found.step_is_exact) == (31, True), "the peers said how far they were"
    assert last(Log().start(0, nodes=1).kill(0).end(0)).blamed == ()


def test_a_step_that_nobody_wrote_down_is_unknown_or_at_least_the_logged_one() -> None:
    assert (
        last(Log().start(0).kill(0).end(0)).step,
        last(Log().start(0).kill(0).end(0)).before_first_step,
    ) == (
        None,
        False,
    )
    logged = incidents(history.read(Log().start(0).kill(0).end(0).events), {0: 120})[-1]
    assert (logged.step, logged.step_is_exact) == (120, False)
    assert last(Log().start(0).kill(0).end(0, reached=130)).step == 130
    assert last(Log().start(0).write(0, "checkpoint_started", step=100).kill(0).end(0)).step == 100


@pytest.mark.parametrize(("step", "expected"), [(0, True), (100, True), (101, False)])
def test_before_the_first_step_counts_from_where_the_attempt_began(step: int, expected: bool) -> None:
    log = Log().start(0).write(0, "checkpoint_committed", step=100).fail(0).end(0).start(1)
    log.write(1, "restored", step=100).fail(1, step=step).end(1)
    assert (last(log).before_first_step, last(log).began) == (expected, 100)


def test_ranks_that_die_before_anything_was_built_had_no_first_step() -> None:
    assert last(Log().start(0, trained=False).kill(0, "SIGSEGV").end(0)).before_first_step


def test_committed_is_what_storage_holds_and_began_may_be_from_memory() -> None:
    log = Log().start(0).write(0, "checkpoint_committed", step=100).kill(0).end(0).start(1)
    log.write(1, "restored", step=149, source="memory").kill(1).end(1)
    assert [(it.began, it.committed) for it in incidents(history.read(log.events))] == [(0, 100), (149, 100)]
    log.start(2).write(2, "restored", step=50).kill(2).end(2)
    assert (last(log).began, last(log).committed) == (50, 50), "the newer one was damaged"


def test_a_lost_node_comes_before_what_follows_from_it() -> None:
    log = Log().start(0).fail(0, rank=0, message="Connection closed by peer").kill(0)
    found = last(log.write(0, "node_lost", node=2, host="node1", cause="its agent is silent").end(0))
    assert (found.kind, found.blamed) == (Kind.node_lost, ("node3",)), "as node 2 had introduced itself"


def test_the_host_of_a_node_that_never_joined_is_not_mistaken_for_the_writers() -> None:
    log = Log().start(0, nodes=2).write(0, "node_lost", node=5, host="node1")
    assert last(log.end(0)).blamed == ()
    log = Log().start(0, nodes=2).write(0, "node_lost", node=5, host="node9")
    assert last(log.end(0)).blamed == ("node9",)


def hung(log: Log, host: str, ranks: dict[int, int], **evidence: Any) -> Log:
    places = [
        {"rank": rank, "phase": "forward", "step": step, "micro_batch": 0, "seconds": 61.0, "state": "S"}
        for rank, step in ranks.items()
    ]
    rank, step = next(iter(ranks.items()))
    told = {"rank": rank, "step": step, "phase": "forward", "ranks": places, "host": host}
    return log.write(0, "hang_detected", **{**told, **evidence})


def test_a_hang_is_of_the_rank_that_is_furthest_behind() -> None:
    log = hung(hung(Log().start(0), "node1", {0: 31, 1: 31}), "node2", {2: 31, 3: 30})
    found = last(log.kill(0).end(0))
    assert (found.kind, found.rank, found.blamed) == (Kind.hang, 3, ("node2",))


def test_a_hang_of_all_ranks_at_one_place_blames_nobody() -> None:
    found = last(hung(hung(Log().start(0), "node1", {0: 31}), "node2", {2: 31}).end(0))
    assert (found.kind, found.cause, found.rank, found.blamed) == (Kind.hang, "hang in forward", None, ())
    assert (found.step, found.step_is_exact) == (31, True)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (75, "cancel", Kind.stopped),
        (75, "signal SIGTERM", Kind.stopped),
        (75, "time_limit", Kind.time_limit),
        (75, "preempted", Kind.preempted),
        (130, None, Kind.stopped),
        (0, None, Kind.finished),
        (93, None, Kind.refused),
        (2, None, Kind.refused),
    ],
)
def test_ends_that_were_asked_for_are_no_failures(code: int, reason: str | None, kind: Kind) -> None:
    log = Log().start(0)
    if reason is not None:
        log.write(0, "stop_requested", reason=reason, step=20)
    assert last(log.end(0, code, decision=None)).kind is kind


def test_an_attempt_without_a_verdict_counts_once_another_one_follows() -> None:
    log = Log().start(0).end(0).start(1)
    assert [it.attempt for it in incidents(history.read(log.events))] == [0]
    log.start(2).end(2)
    assert [it.kind for it in incidents(history.read(log.events))] == [
        Kind.rank_failed,
        Kind.lost,
        Kind.rank_failed,
    ]
    known = Log().start(0).fail(0).start(1).end(1)
    assert incidents(history.read(known.events))[0].cause == "ValueError in train/step.py:run"


def test_who_resumes_a_run_that_had_ended_is_a_person() -> None:
    log = Log().start(0).end(0, decision="restart").start(1).end(1, decision="give_up")
    log.start(2, job="8").end(2, decision=None).write(2, "requeued", job="9", how="chain").start(
        3, job="9"
    ).end(3)
    log.start(4, job=None).end(4, decision=None).start(5, job=None).end(5)
    assert [it.by_hand for it in incidents(history.read(log.events))] == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]


def test_slurm_starts_a_job_again_without_a_word() -> None:
    log = Log().start(0, job="7").start(1, job="7").end(1)
    assert [it.by_hand for it in incidents(history.read(log.events))] == [True, False]


def test_excluded_hosts_and_rehearsals_are_remembered() -> None:
    log = (
        Log()
        .start(0)
        .write(0, "fault_injected", rank=3, step=30, fault="sigkill")
        .kill(0)
        .end(0, decision=None)
    )
    log.write(0, "restarting", decision="replace", exclude=["node2", 7])
    found = last(log)
    assert (found.excluded, found.rehearsed, found.step) == (("node2",), True, 30)


def test_damaged_records_end_nothing() -> None:
    log = Log().start(0).write(0, "hang_detected", rank=1, ranks=[{"rank": "x"}, 3], step=None)
    log.write(0, "restored", step="x").write(0, "requeued", exclude="node1").end(0, step=None, reached="far")
    assert last(log).kind is Kind.hang
