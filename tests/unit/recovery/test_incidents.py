"""Events become incidents: kind, cause, host and steps, and what is left open where nobody wrote it down."""

from __future__ import annotations

from typing import Any

import pytest
from incident_logs import TRACEBACK, Log

from orchestra.recovery.incidents import BROKEN_PEER, Kind, fingerprint
from orchestra.recovery.policy import is_charged
from orchestra.run.rollback import BROKEN_DEVICE, EVENT, NOT_FINITE, SPIKE, RollBack, Stretch


def test_an_error_is_told_with_its_place_in_our_code_and_blames_no_host() -> None:
    found = Log().start(0).fail(0).end(0).last
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
    found = Log().start(0).fail(0, message="CUDA error: uncorrectable ECC error encountered").end(0).last
    assert (found.cause, found.blamed) == (BROKEN_DEVICE, ("node2",))


def test_who_lost_a_connection_is_not_whom_it_was_about() -> None:
    log = Log().start(0).fail(0, rank=0, host="node1", message="Connection closed by peer", step=31)
    found = log.fail(0, rank=5, host="node3", step=31).end(0).last
    assert (found.rank, found.host, found.cause) == (5, "node3", "ValueError in train/step.py:run")


def test_a_killed_rank_speaks_against_its_host_unless_it_was_the_only_one() -> None:
    found = Log().start(0).fail(0, rank=0, message="Connection reset", step=31).kill(0).end(0).last
    assert (found.cause, found.blamed) == ("killed by SIGKILL", ("node2",))
    assert (found.step, found.step_is_exact) == (31, True), "the peers said how far they were"
    assert Log().start(0, nodes=1).kill(0).end(0).last.blamed == ()


def test_a_step_that_nobody_wrote_down_is_unknown_or_at_least_the_logged_one() -> None:
    log = Log().start(0).kill(0).end(0)
    assert (log.last.step, log.last.before_first_step) == (None, False)
    (logged,) = log.incidents({0: 120})
    assert (logged.step, logged.step_is_exact) == (120, False)
    assert Log().start(0).kill(0).end(0, reached=130).last.step == 130
    assert Log().start(0).write(0, "checkpoint_started", step=100).kill(0).end(0).last.step == 100


@pytest.mark.parametrize(("step", "expected"), [(0, True), (100, True), (101, False)])
def test_before_the_first_step_counts_from_where_the_attempt_began(step: int, expected: bool) -> None:
    log = Log().start(0).write(0, "checkpoint_committed", step=100).fail(0).end(0).start(1)
    log.write(1, "restored", step=100).fail(1, step=step).end(1)
    assert (log.last.before_first_step, log.last.began) == (expected, 100)


def test_ranks_that_die_before_anything_was_built_had_no_first_step() -> None:
    assert Log().start(0, trained=False).kill(0, "SIGSEGV").end(0).last.before_first_step


def test_committed_is_what_storage_holds_and_began_may_be_from_memory() -> None:
    log = Log().start(0).write(0, "checkpoint_committed", step=100).kill(0).end(0).start(1)
    log.write(1, "restored", step=149, source="memory").kill(1).end(1)
    assert [(incident.began, incident.committed) for incident in log.incidents()] == [(0, 100), (149, 100)]
    log.start(2).write(2, "restored", step=50).kill(2).end(2)
    assert (log.last.began, log.last.committed) == (50, 50), "the newer one was damaged"


def test_a_lost_node_comes_before_what_follows_from_it() -> None:
    log = Log().start(0).fail(0, rank=0, message="Connection closed by peer").kill(0)
    found = log.write(0, "node_lost", node=2, host="node1", cause="its agent is silent").end(0).last
    assert (found.kind, found.blamed) == (Kind.node_lost, ("node3",)), "as node 2 had introduced itself"


def test_the_host_of_a_node_that_never_joined_is_not_mistaken_for_the_writers() -> None:
    log = Log().start(0, nodes=2).write(0, "node_lost", node=5, host="node1")
    assert log.end(0).last.blamed == ()
    log = Log().start(0, nodes=2).write(0, "node_lost", node=5, host="node9")
    assert log.end(0).last.blamed == ("node9",)


def hung(log: Log, host: str, ranks: dict[int, int], **evidence: Any) -> Log:
    places = [
        {"rank": rank, "phase": "forward", "step": step, "micro_batch": 0, "seconds": 61.0, "state": "S"}
        for rank, step in ranks.items()
    ]
    rank, step = next(iter(ranks.items()))
    hang = {"rank": rank, "step": step, "phase": "forward", "ranks": places, "host": host}
    return log.write(0, "hang_detected", **{**hang, **evidence})


def test_a_hang_is_of_the_rank_that_is_furthest_behind() -> None:
    log = hung(hung(Log().start(0), "node1", {0: 31, 1: 31}), "node2", {2: 31, 3: 30})
    found = log.kill(0).end(0).last
    assert (found.kind, found.rank, found.blamed) == (Kind.hang, 3, ("node2",))


def test_a_hang_of_all_ranks_at_one_place_blames_nobody() -> None:
    found = hung(hung(Log().start(0), "node1", {0: 31}), "node2", {2: 31}).end(0).last
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
    assert log.end(0, code, decision=None).last.kind is kind


def test_an_attempt_without_a_verdict_counts_once_another_one_follows() -> None:
    log = Log().start(0).end(0).start(1)
    assert [incident.attempt for incident in log.incidents()] == [0]
    log.start(2).end(2)
    assert [incident.kind for incident in log.incidents()] == [Kind.rank_failed, Kind.lost, Kind.rank_failed]
    known = Log().start(0).fail(0).start(1).end(1)
    assert known.incidents()[0].cause == "ValueError in train/step.py:run"


def test_who_resumes_a_run_that_had_ended_is_a_person() -> None:
    log = Log().start(0).end(0, decision="restart").start(1).end(1, decision="give_up")
    log.start(2, job="8").end(2, decision=None).write(2, "requeued", job="9", how="chain")
    log.start(3, job="9").end(3)
    log.start(4, job=None).end(4, decision=None).start(5, job=None).end(5)
    by_hand = [incident.by_hand for incident in log.incidents()]
    assert by_hand == [True, False, True, False, False, True]


def test_who_resumes_a_run_whose_next_job_began_no_attempt_is_a_person() -> None:
    def moved(**evidence: str) -> Log:
        log = Log().start(0).fail(0).end(0, decision="requeue").write(0, "requeued", job="8", how="chain")
        return log.write(0, "start_failed", code=1, before_start=True, **evidence) if evidence else log

    assert not moved().start(1, job="8").end(1).last.by_hand
    assert moved(job="8").start(1, job="9").end(1).last.by_hand
    assert moved().write(1, "cancelled", job="8").start(1, job="9").end(1).last.by_hand
    # Slurm began that very job again, or the job moved on before its attempt began.
    assert not moved(job="8").start(1, job="8").end(1).last.by_hand
    again = moved(job="8").write(0, "requeued", job="9", before_start=True)
    assert not again.start(1, job="9").end(1).last.by_hand
    # It was cancelled in the moment that it was submitted.
    at_once = moved().write(0, "cancelled", job="8")
    assert at_once.start(1, job="9").end(1).last.by_hand
    # An older job that an administrator started again says nothing of one that restarts in place.
    older = moved().start(1, job="8").fail(1).write(1, "start_failed", code=1, job="7", before_start=True)
    assert not older.end(1).start(2, job="8").end(2).last.by_hand
    # A cancel of the attempt itself.
    assert not moved().start(1, job="8").write(1, "cancelled", job="7").end(1).last.by_hand


def test_slurm_starts_a_job_again_without_a_word() -> None:
    log = Log().start(0, job="7").start(1, job="7").end(1)
    assert [incident.by_hand for incident in log.incidents()] == [True, False]


def test_excluded_hosts_and_rehearsals_are_remembered() -> None:
    log = Log().start(0).write(0, "fault_injected", rank=3, step=30, fault="sigkill")
    log.kill(0).end(0, decision=None).write(0, "restarting", decision="replace", exclude=["node2", 7])
    found = log.last
    assert (found.excluded, found.rehearsed, found.step) == (("node2",), True, 30)


def test_what_the_next_job_found_before_its_attempt_says_nothing_of_the_one_before() -> None:
    log = Log().start(0).fail(0).end(0)
    log.write(0, "requeued", rule="nodes_unfit", exclude=["node9"], before_start=True)
    assert (log.last.excluded, is_charged(log.last)) == ((), True)
    log.write(0, "node_unfit", host="node2", cause="nvidia-smi shows 7 devices, 8 are needed", device=True)
    assert (log.last.unfit, log.last.of_device, is_charged(log.last)) == (("node2",), True, False)


def test_damaged_records_end_nothing() -> None:
    log = Log().start(0).write(0, "hang_detected", rank=1, ranks=[{"rank": "x"}, 3], step=None)
    log.write(0, "restored", step="x").write(0, "requeued", exclude="node1").end(0, step=None, reached="far")
    assert log.last.kind is Kind.hang


@pytest.mark.parametrize("cause", ["StorageOutageError", "DataOutageError"])
def test_a_storage_that_does_not_answer_is_nobodys_fault(cause: str) -> None:
    found = Log().start(0).fail(0, cause=cause).end(0).last
    assert (found.kind, found.cause) == (Kind.storage, "the storage did not answer")
    assert found.blamed == ()


def rolled(cause: str, **evidence: object) -> Log:
    log = Log().start(0).write(0, EVENT, **{"step": 150, "to": 100, "cause": cause, **evidence})
    return log.fail(0, cause="RollBackError")


def test_the_events_say_what_was_rolled_back_and_where_to() -> None:
    found = rolled(NOT_FINITE, left_out=[[8, 16]], data_steps=[2, 2]).end(0).last
    assert (found.kind, found.cause, found.step, found.blamed) == (Kind.loss, NOT_FINITE, 150, ())
    assert found.roll_back == RollBack(0, 150, 100, NOT_FINITE, (Stretch(8, 16),), (2, 2))


def test_a_lost_node_comes_before_the_roll_back_that_it_had_a_part_in() -> None:
    found = rolled(SPIKE).write(0, "node_lost", node=1, host="node2").end(0).last
    assert (found.kind, found.blamed) == (Kind.node_lost, ("node2",))


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_replay_blames_the_host_of_the_rank_by_the_name_that_the_attempt_knows(is_settled: bool) -> None:
    log = Log()
    log.write(0, "attempt_started", node=0, nodes=4, job="7", hosts=["a", "b", "c", "d"])
    log.write(0, "training_started", rank=0, world_size=8)
    log.write(0, "replay_differs", rank=5, host="c.cluster", step=150, is_settled=is_settled)
    log.write(0, EVENT, step=150, to=100, cause=BROKEN_DEVICE).fail(0, cause="RollBackError").end(0)
    found = log.last
    assert (found.kind, found.cause) == (Kind.replay, BROKEN_DEVICE)
    assert found.blamed == (("c",) if is_settled else ())
    assert found.rank == (5 if is_settled else None)
