"""What ended an attempt, judged from events as workers and agents write them."""

from __future__ import annotations

import pytest

from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.recovery.history import Attempt, attempt_of, last_attempt
from orchestra.recovery.incidents import Verdict, first_failure, judge, node_verdict, signal_name
from orchestra.run.files import Record


def _event(event: str, time: float, **evidence: object) -> Record:
    return {"time": time, "attempt": 0, "event": event, "host": "node-a", **evidence}


def _failed(time: float, rank: int, code: int = 1, **evidence: object) -> Record:
    return _event("failed", time, rank=rank, code=code, cause="Error", **evidence)


def _attempt(*events: Record) -> Attempt:
    return attempt_of(events, 0)


def _judged(*events: Record, exit_code: int = 1, interruption: str | None = None) -> Verdict:
    return judge(_attempt(*events), exit_code=exit_code, interruption=interruption)


KILLED = _event("rank_failed", 9.0, rank=3, code=1, cause="killed by SIGKILL", signal="SIGKILL")


@pytest.mark.parametrize("interruption", [None, "SIGINT received"], ids=["undisturbed", "stopped too late"])
def test_all_ranks_finished_and_torchrun_agrees(interruption: str | None) -> None:
    finished = _event("finished", 2.0, rank=0, code=0, step=7)
    verdict = _judged(finished, exit_code=0, interruption=interruption)
    assert (verdict.code, verdict.state, verdict.step) == (0, "finished", 7)


def test_the_first_failing_rank_by_time_gives_code_and_cause_unless_one_was_killed() -> None:
    first = _failed(2.0, 1, EXIT_DO_NOT_RESTART, step=5, message="loss is nan")
    verdict = _judged(_failed(3.0, 0, 1), first)
    assert (verdict.code, verdict.rank, verdict.step) == (EXIT_DO_NOT_RESTART, 1, 5)
    assert (verdict.message, verdict.state) == ("loss is nan", "failed")
    verdict = _judged(_failed(2.0, 0), KILLED)
    assert (verdict.rank, verdict.cause) == (3, "killed by SIGKILL"), "its peers noticed first"


def test_a_stop_request_explains_whatever_broke_after_it() -> None:
    verdict = _judged(_failed(2.0, 0), interruption="SIGINT received")
    assert (verdict.code, verdict.state, verdict.rank) == (EXIT_INTERRUPTED, "interrupted", None)


def test_a_stop_that_all_ranks_agreed_on_blames_none_of_them_even_where_the_last_words_were_cut_off() -> None:
    stopped = [_failed(2.0, rank, EXIT_STOPPED, step=7, message="cancel") for rank in (1, 0)]
    for exit_code, interruption in ((0, None), (1, None), (1, "SIGTERM received, and a second signal")):
        verdict = _judged(*stopped, exit_code=exit_code, interruption=interruption)
        assert (verdict.code, verdict.step, verdict.message) == (EXIT_STOPPED, 7, "cancel")
        assert (verdict.rank, verdict.traceback) == (None, None)
    last = _event("failed", 3.0, node=0, code=75, cause="StopRequested", step=7)
    recorded = node_verdict(_attempt(*stopped, last))
    assert recorded is not None
    assert (recorded.state, recorded.rank, recorded.step) == ("stopped", None, 7)


def test_a_rank_that_stopped_is_to_be_continued_unless_another_one_failed() -> None:
    verdict = _judged(_failed(2.0, 0, EXIT_STOPPED))
    assert (verdict.code, verdict.state) == (EXIT_STOPPED, "stopped")
    verdict = _judged(_failed(2.0, 0, EXIT_STOPPED), KILLED)
    assert (verdict.code, verdict.rank) == (EXIT_FAILED, 3)


@pytest.mark.parametrize(("exit_code", "words"), [(1, "code 1"), (-9, "SIGKILL"), (0, "code 0")])
def test_silence_is_a_failure_and_no_failure_ends_with_code_0(exit_code: int, words: str) -> None:
    verdict = _judged(exit_code=exit_code)
    assert verdict.code == EXIT_FAILED
    assert words in verdict.message
    assert _judged(_failed(1.0, 0, 0)).code == EXIT_FAILED


def test_the_recorded_end_is_read_back_with_the_rank_that_caused_it() -> None:
    failed = _failed(2.0, 1, step=5, traceback="Traceback …")
    verdict = node_verdict(_attempt(failed, _event("failed", 3.0, node=0, code=1, cause="Error")))
    assert verdict is not None
    assert (verdict.code, verdict.rank, verdict.traceback) == (1, 1, "Traceback …")
    assert node_verdict(_attempt(failed)) is None


def test_events_are_told_apart_by_attempt() -> None:
    later = {**_event("attempt_started", 3.0), "attempt": 1}
    events = [_event("attempt_started", 1.0), _failed(2.0, 0), later]
    assert last_attempt(events) == 1
    assert first_failure(attempt_of(events, 1)) is None
    assert last_attempt([]) is None


def test_signals_have_names_and_unknown_ones_numbers() -> None:
    assert (signal_name(11), signal_name(250)) == ("SIGSEGV", "signal 250")
