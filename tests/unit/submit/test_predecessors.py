"""`submit --after`: how the other run stands, which jobs are waited for, and what is refused with 2."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import ME, FakeSlurm, queue_line
from support.run_records import (
    age_files,
    led_here,
    started_elsewhere,
    state_by_slurm,
    submitted,
    submitted_sweep,
)

from orchestra.errors import ConfigError, LaunchError
from orchestra.report import run_state
from orchestra.report.run_state import RunState, read_state
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.record import RunPhase
from orchestra.submit.fair import predecessors
from orchestra.submit.fair.predecessors import (
    Following,
    Stand,
    followers_of,
    following,
    predecessor_of,
    progress,
    record_of,
    refuse_cycle,
)

CPU = ("cluster.device=cpu", "cluster.gpus_per_node=2", "run.dir=runs")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def queue(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.put("squeue")
    fake_slurm.put("sacct", "exit 1")
    return fake_slurm


def after(*places: RunDir | SweepDir) -> Following:
    return following([predecessor_of(place) for place in places], time.time())


def ended(run: RunDir, code: int) -> None:
    event = "failed" if code else "finished"
    started_elsewhere(run, job="7").write(event, node=0, code=code, cause="NonFiniteError")


def ended_in(job: str, run: RunDir, code: int) -> None:
    started_elsewhere(run, job=job).write("failed", node=0, code=code, cause="StopRequested")


def submit_time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def follower(tmp_path: Path, name: str, *before: RunDir) -> RunDir:
    run = submitted(tmp_path, name, "9")
    record = json.loads(run.record.read_text())
    run.record.write_text(json.dumps({**record, "after": record_of(map(predecessor_of, before))}))
    return run


def test_a_run_that_waits_trains_or_was_requeued_is_waited_for_by_its_newest_job(
    tmp_path: Path, queue: FakeSlurm
) -> None:
    run = submitted(tmp_path)
    for state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING"):
        queue.says("squeue", prints=queue_line("7", state, "one"))
        assert after(run).jobs == ("7",)
    assert after(run).awaited == ("one",)


def test_a_job_that_slurm_calls_completed_says_nothing_of_the_run(tmp_path: Path, queue: FakeSlurm) -> None:
    run = submitted(tmp_path)
    queue.says("squeue", prints=queue_line("7", "COMPLETED", "one"))
    ended(run, 75)
    with pytest.raises(ConfigError, match=r"after one: it was stopped .*`orchestra resume one` first"):
        after(run)
    # The attempt has its verdict, and Slurm may queue its job again.
    queue.says("squeue", prints=queue_line("7", "COMPLETING", "one"))
    assert after(run).jobs == ("7",)


def test_what_failed_was_cancelled_or_is_gone_is_refused_and_what_is_done_is_not_waited_for(
    tmp_path: Path, queue: FakeSlurm
) -> None:
    done, bad = submitted(tmp_path, "done"), submitted(tmp_path, "bad")
    ended(done, 0)
    ended(bad, 93)
    assert after(done) == Following((predecessor_of(done),))
    with pytest.raises(ConfigError, match=r"it failed \(exit code 93: NonFiniteError\)"):
        after(done, bad)
    (one,), _ = progress([predecessor_of(RunDir(tmp_path / "runs" / "nosuch"))], time.time())
    assert (one.stand, "is gone" in one.words) == (Stand.ended, True)
    queue.says("squeue", complains="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert after(done).jobs == ()
    with pytest.raises(LaunchError, match="nothing was submitted"):
        after(submitted(tmp_path, "open"))


@pytest.mark.usefixtures("queue")
def test_a_run_in_the_foreground_has_no_job_to_wait_for(tmp_path: Path) -> None:
    here = led_here(RunDir(tmp_path / "runs" / "here"))
    with pytest.raises(ConfigError, match="has no job of this cluster that Slurm could wait for"):
        after(here)
    assert not after(led_here(RunDir(tmp_path / "runs" / "there"), ended=0)).awaited


@pytest.mark.parametrize("old_job", ["COMPLETED", "gone"])
@pytest.mark.parametrize("place", ["here", "another host"])
def test_a_run_that_was_resumed_in_the_foreground_goes_on_in_no_job(
    tmp_path: Path, queue: FakeSlurm, old_job: str, place: str
) -> None:
    run = submitted(tmp_path, job="11", attempt=0)
    ended_in("11", run, 75)
    if old_job != "gone":
        queue.says("sacct", prints=f"11|{old_job}|{ME}|0:0|node1|{submit_time()}|one|orchestra:one")
    if place == "here":
        led_here(run, 1)
    else:
        started_elsewhere(run, 1)
    assert is_in_foreground(run)
    # Its leader waits, and begins another attempt.
    writer = EventWriter(run, node_writer(1, 0), 1)
    writer.write("failed", node=0, code=1, cause="RuntimeError")
    writer.write("restarting", decision="restart", reason="again", wait_s=60.0, node=0)
    assert state_by_slurm(run).state is RunPhase.restarting
    assert is_in_foreground(run)


def is_in_foreground(run: RunDir) -> bool:
    (one,), problems = progress([predecessor_of(run)], time.time())
    with pytest.raises(ConfigError, match="has no job of this cluster that Slurm could wait for"):
        after(run)
    return (one.stand, one.jobs, problems) == (Stand.goes_on, (), [])


def test_a_run_that_another_job_leads_than_its_record_names_is_not_over_with_that(
    tmp_path: Path, queue: FakeSlurm
) -> None:
    run = submitted(tmp_path, job="11", attempt=0)
    started_elsewhere(run, job="13")
    assert is_in_foreground(run)
    # Slurm has lost the very job, and the files grow.
    own = submitted(tmp_path, "own", job="14", attempt=0)
    started_elsewhere(own, job="14")
    assert is_in_foreground(own)


def test_what_cannot_be_read_or_is_silent_has_not_ended(
    tmp_path: Path, queue: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = led_here(RunDir(tmp_path / "runs" / "silent"), host="elsewhere")
    age_files(silent, 900.0)
    sweep = submitted_sweep(tmp_path, 2)
    broken = SweepDir(tmp_path / "runs" / "broken")
    broken.path.mkdir()
    broken.record.write_text("{")
    for place, words in {
        silent: "silent is unknown",
        broken: "broken cannot be read",
        sweep.member(0): "cannot be read",
    }.items():
        if place == sweep.member(0):
            monkeypatch.setattr(run_state, "_read_state", unreadable)
        (one,), problems = progress([predecessor_of(place)], time.time())
        assert (one.stand, words in " ".join(problems)) == (Stand.not_known, True)
        with pytest.raises(LaunchError, match="is not known; nothing was submitted"):
            after(place)
    (one,), problems = progress([predecessor_of(sweep)], time.time())
    assert (one.stand, "members of which nothing is known: 000 cannot" in problems[0]) == (
        Stand.not_known,
        True,
    )


def unreadable(run: RunDir, _: float) -> RunState:
    raise PermissionError(13, "Permission denied", str(run.events))


def test_a_directory_that_cannot_be_looked_into_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    monkeypatch.setattr(predecessors, "names_in", unlisted)
    (one,), problems = progress([predecessor_of(run)], time.time())
    assert (one.stand, problems) == (Stand.not_known, [f"one cannot be read: {run.path}"])


def unlisted(folder: Path) -> list[str]:
    raise OSError(116, "Stale file handle", str(folder))


def test_all_jobs_of_several_kinds_are_waited_for(tmp_path: Path, queue: FakeSlurm) -> None:
    run = submitted(tmp_path, job="31", alternative=0)
    record = json.loads(run.record.read_text())
    newest = {**record["jobs"][0], "id": "32", "token": "orchestra:two", "alternative": 1}
    run.record.write_text(json.dumps({**record, "jobs": [*record["jobs"], newest]}))
    lines = [queue_line("31", "PENDING", "one"), queue_line("32", "PENDING", "one", token="orchestra:two")]
    queue.says("squeue", prints="\n".join(lines))
    assert sorted(after(run).jobs) == ["31", "32"]


def test_a_damaged_list_of_predecessors_is_no_error(tmp_path: Path) -> None:
    run = submitted(tmp_path, job=None)
    record = json.loads(run.record.read_text())
    run.record.write_text(json.dumps({**record, "after": [5, "name", {"name": "first"}]}))
    assert read_state(run, time.time()).after == ("first",)


def test_a_sweep_is_done_when_all_its_members_are(tmp_path: Path, queue: FakeSlurm) -> None:
    sweep = submitted_sweep(tmp_path, 3)
    lines = [queue_line(f"50_{index}", "PENDING", "lr-sweep", token="orchestra:aa") for index in range(3)]
    queue.says("squeue", prints="\n".join(lines))
    assert after(sweep).jobs == ("50",)
    assert after(sweep.member(1)).jobs == ("50_1",)
    for index in range(2):
        started_elsewhere(sweep.member(index), job=f"50_{index}").write("finished", node=0, code=0)
    assert after(sweep).awaited == ("lr-sweep",)
    queue.says("squeue", prints="")
    started_elsewhere(sweep.member(2), job="50_2").write("failed", node=0, code=93, cause="NonFiniteError")
    with pytest.raises(ConfigError, match=r"has members that are not done: 002 failed \(exit code 93"):
        after(sweep)
    started_elsewhere(sweep.member(2), 1, job="51").write("finished", node=0, code=0)
    assert after(sweep).jobs == ()


def test_a_circle_of_runs_is_refused(tmp_path: Path) -> None:
    first = submitted(tmp_path, "first")
    second = follower(tmp_path, "second", first)
    third = follower(tmp_path, "third", second)
    refuse_cycle(RunDir(tmp_path / "runs" / "new"), [predecessor_of(third)])
    with pytest.raises(ConfigError, match="after third, which begins after second, which begins after first"):
        refuse_cycle(first, [predecessor_of(third)])


def test_status_and_cancel_say_who_waits_for_whom(
    tmp_path: Path, queue: FakeSlurm, orchestra: CommandLine
) -> None:
    first, begun = submitted(tmp_path, "first"), follower(tmp_path, "begun")
    waits = follower(tmp_path, "waits", first)
    ended(begun, 75)
    lines = [queue_line("7", "RUNNING", "first"), queue_line("9", "PENDING", "waits", reason="Dependency")]
    queue.says("squeue", prints="\n".join(lines))
    assert state_by_slurm(waits).cause == "waits until first is done"
    assert "reason  waits until first is done" in orchestra("status", "waits").out
    assert orchestra.json("status", "waits")[0]["after"] == ["first"]
    assert followers_of(first, [first, begun, waits], time.time()) == ["waits"]
    started_elsewhere(first, job="7")
    said = orchestra("cancel", "first", "--dry-run").out
    assert "waits begins after first and, unless that goes on or is done by then, will end without" in said
    assert "`orchestra cancel waits` takes it out of the queue" in said
    assert "begins after" not in orchestra("cancel", "waits", "--dry-run").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--after", "nosuch"), "RUN nosuch: no run in"),
        (("--after", "new"), "the new run, run.name=new, would wait for itself"),
        (("--after", "one", "-m", "train.seed=1,2"), "--after is for single runs"),
        (("--after", "one", "cluster.slurm_extra.dependency=singleton"), "a job takes one of them"),
        (
            ("--after", "one", "cluster.alternatives=[{constraint: a}, {constraint: b}]"),
            "--after with cluster.alternatives",
        ),
    ],
)
@pytest.mark.usefixtures("queue")
def test_what_cannot_be_waited_for_ends_with_2(
    words: tuple[str, ...], says: str, tmp_path: Path, orchestra: CommandLine
) -> None:
    submitted(tmp_path)
    assert says in orchestra("submit", *CPU, "run.name=new", *words, "--dry-run", code=2).err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]


def test_weights_that_the_other_run_is_to_leave_need_not_be_there_yet(
    tmp_path: Path, queue: FakeSlurm, orchestra: CommandLine
) -> None:
    submitted(tmp_path)
    queue.says("squeue", prints=queue_line("7", "RUNNING", "one"))
    words = ("submit", *CPU, "run.name=new", "model.init_from=hf-one", "--dry-run")
    assert "model.init_from" in orchestra(*words, code=2).err
    plan = orchestra.json(*words, "--after", "one")
    assert plan["after"] == {
        "runs": [{"name": "one", "path": str(tmp_path / "runs" / "one")}],
        "awaited": ["one"],
        "jobs": ["7"],
    }
    lines = plan["script"].splitlines()
    first = next(line for line in lines if "orchestra.agents.follow" in line)
    assert lines.index(first) < next(at for at, line in enumerate(lines) if line.startswith("srun "))
