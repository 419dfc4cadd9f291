"""Ranks, agents, nodes and srun are killed, the first node too; the run ends with the uninterrupted run's
numbers. And such a loss is rehearsed.

Each fault follows an event of the run, never a clock. The oracle is that of the fault matrix.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from matrix_injections import LENGTH
from matrix_oracle import References, assert_as_if_nothing_had_happened, samples
from sites import SLOW_FIRST_ATTEMPT, Site, SubmittedRun, by_age, slow_attempts

from orchestra.agents.agent import group_folder
from orchestra.run.files import Record, read_json_lines
from orchestra.run.paths import RunDir
from tests.support.browser import Browser
from tests.support.report_pages import SECTIONS, assert_sound, data_of, texts

pytestmark = pytest.mark.slow

QUICK = ("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=0.1")
TWO_NODES = ("cluster.nodes=2", "cluster.gpus_per_node=1")
# Of the second attempt of a run of 150 steps that loses a node early.
SPIKE_AT = 100
HANG = "recovery.inject=[{at_step: 20, rank: 1, fault: hang, phase: reduce}]"


def fork_server(cluster: Site, host: str) -> int:
    """Return the youngest fork server on a host."""
    lines = cluster.processes_on(host).items()
    return by_age(pid for pid, line in lines if "launchers.fork_server.server" in line)[-1]


def trains_again(run: SubmittedRun, attempt: int) -> None:
    """Wait until an attempt has made a new step."""
    run.wait_for_attempt(attempt, 60)
    run.wait_for_steps(3)


@pytest.mark.timeout(300)
def test_rank_agent_and_first_node_of_a_pipeline_are_lost_one_after_another(cluster: Site) -> None:
    stages = ("parallelism.pp=3", "parallelism.zero=1", "model.num_hidden_layers=4")
    stages += ("train.steps=120", "checkpoint.every_steps=10", "data.ledger=true")
    # As few as fill the pipeline: each costs all ranks.
    stages += ("train.micro_batch_size=1", "train.global_batch_size=4")
    shape = (*QUICK, slow_attempts(3, 0.1), "cluster.nodes=3", "cluster.spare_nodes=1")
    run = cluster.submit_run("hunted", *stages, *shape)
    run.wait_for_step(13)
    first = run.hosts(0)
    run.hit_rank(1)
    trains_again(run, 1)
    assert run.hosts(1) == first

    warm = fork_server(cluster, first[2])
    run.hit_agent(2)
    trains_again(run, 2)
    assert run.hosts(2) == first
    # The next agent's ranks are forked from what the dead one's were.
    assert fork_server(cluster, first[2]) == warm

    run.fail_node(0)
    trains_again(run, 3)
    (replaced,) = run.events("node_replaced")
    assert replaced["host"] == first[0]
    assert run.hosts(3) == [replaced["by_host"], *first[1:]]
    # Paid for with the one that stood by, and at last with those that are left.
    assert [event["nodes_held"] for event in run.events("attempt_started")] == [4, 4, 4, 3]
    # All nodes had looked at themselves and each other first, and none was found wanting.
    (checked,) = run.events("node_checked")
    assert (checked["nodes"], checked["looked"]) == (4, 4), run.logs()
    assert not {"unfit", "doubt", "left_out", "clock_off_s"} & set(checked), checked
    assert run.events("node_slow") == []
    assert_as_if_nothing_had_happened(run, References(cluster, stages, "hunted").of(3))


@pytest.mark.timeout(300)
def test_without_a_spare_it_shrinks_or_goes_on_in_another_job(cluster: Site, references: References) -> None:
    shape = (*LENGTH, *QUICK, SLOW_FIRST_ATTEMPT, "cluster.nodes=2")
    shrinking = cluster.submit_run("shrinking", *shape, "recovery.min_nodes=1")
    moving = cluster.submit_run("moving", *shape)
    for run in (shrinking, moving):
        run.wait_for_step(13)
    gone = [run.hosts(0)[1] for run in (shrinking, moving)]
    for host in dict.fromkeys(gone):
        cluster.fail(host)
    trains_again(shrinking, 1)
    assert shrinking.hosts(1) == shrinking.hosts(0)[:1]
    requeued = moving.wait_for_event("requeued")
    assert len(moving.events("requeued")) == 1
    assert (requeued["how"], requeued["after"], requeued["exclude"]) == ("chain", moving.job, [gone[1]])
    trains_again(moving, 1)
    assert gone[1] not in moving.hosts(1)
    assert_as_if_nothing_had_happened(moving, references.of(2))
    shrinking.assert_state("finished")
    assert samples(shrinking.dir) == samples(references.of(2))


@pytest.mark.timeout(150)
def test_a_rank_that_hangs_in_a_collective_is_found_before_the_outer_limit(cluster: Site) -> None:
    """Where all nodes wait for each other, steps have taught how long is too long."""
    length = ("train.steps=30", "checkpoint.every_steps=5")
    run = cluster.submit_run("hangs-afar", *TWO_NODES, *length, HANG, "recovery.heartbeat_timeout_s=600")
    run.wait_for_event("hang_detected", 80)
    run.assert_job_ends("COMPLETED")
    (hang,) = run.events("hang_detected")
    assert (hang["rank"], hang["step"], hang["phase"], hang["limit"]) == (1, 20, "reduce", 20.0)
    assert "loop_in_python" in run.dir.rank_stacks(0, 1).read_text()
    (stall,) = json.loads(cluster.orchestra("why", run.dir.name, "--json").stdout)["stalled_collectives"]
    # For the next step's gradients, or on a slow machine for the word on stopping that comes before them.
    entered = r"(all_reduce \d+ of group dp \(2 ranks, fp32|broadcast \d+ of group dp \(2 ranks, long)\["
    assert re.match(f"rank 1 has not entered {entered}.*; rank 0 waits there$", stall), stall
    assert run.steps() == list(range(1, 31))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_a_node_lost_before_the_step_began_costs_the_run_one_job(cluster: Site, is_noticed: bool) -> None:
    # The set-up lines are what a job does between its nodes' allocation and its step.
    late = (*TWO_NODES, "cluster.setup=[sleep 8]", "train.steps=10")
    run = cluster.submit_run("noticed" if is_noticed else "unnoticed", *late)
    job = f"--jobs={run.job}"
    run.wait(lambda: cluster.queue(job, "--states=R"), "the job runs")
    listed = cluster.queue(job, "--format=%N")[0].strip()
    lost = cluster.run("scontrol", "show", "hostnames", listed).stdout.split()[1]
    cluster.fail(lost)
    if is_noticed:
        # As Slurm does after SlurmdTimeout: the job no longer has it when srun asks for the step.
        cluster.as_root("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
    requeued = run.wait_for_event("requeued", 120)
    assert len(run.events("requeued")) == 1
    assert (requeued["rule"], requeued["after"], requeued["exclude"]) == ("step_not_started", run.job, [lost])
    run.assert_state("finished", 120)
    (started,) = run.events("attempt_started")
    assert lost not in started["hosts"]
    assert (started["job"], started["attempt"]) == (requeued["job"], 0)


# Stands for a container's start: on what was the second node of the first job there is none.
BROKEN = """#!/bin/sh
[ "$SLURM_PROCID" = 1 ] && [ ! -e broken ] && echo "$SLURMD_NODENAME" > broken
[ "$(cat broken 2> /dev/null)" = "$SLURMD_NODENAME" ] && exit 127
exec "$@"
"""


@pytest.mark.timeout(240)
def test_a_node_where_no_agent_starts_costs_the_run_one_job(cluster: Site) -> None:
    """As where a mount is missing: srun says so at once, and the other agents would wait for ten minutes."""
    script = cluster.shared / "broken.sh"
    script.write_text(BROKEN)
    script.chmod(0o755)
    run = cluster.submit_run("broken", *TWO_NODES, f"cluster.container.prefix={script}", "train.steps=10")
    requeued = run.wait_for_event("requeued", 60)
    lost = (run.dir.path / "broken").read_text().strip()
    assert (requeued["rule"], requeued["after"], requeued["exclude"]) == ("nodes_unfit", run.job, [lost])
    run.assert_state("finished", 120)
    (started,) = run.events("attempt_started")
    assert lost not in started["hosts"]
    assert f"{lost}: its task ended before its agent had come (Exited with exit code 127)" in run.logs()


def training(cluster: Site, name: str, *overrides: str) -> SubmittedRun:
    """Return a run over two nodes that trains; its first attempt takes its time."""
    length = ("train.steps=150", "checkpoint.every_steps=20")
    run = cluster.submit_run(name, *TWO_NODES, *length, SLOW_FIRST_ATTEMPT, *overrides)
    run.wait_for_event("checkpoint_committed")
    return run


def sruns(cluster: Site, host: str) -> list[int]:
    """Return the srun of a job and its helper, which kills the step as soon as srun is gone."""
    return by_age(pid for pid, line in cluster.processes_on(host).items() if line.startswith("srun "))


# The second node's task waits until it is told to begin.
TOLD = """#!/bin/sh
[ "$SLURM_PROCID" = 0 ] || while [ ! -e begin ]; do sleep 0.1; done
exec "$@"
"""


@pytest.mark.timeout(300)
def test_an_srun_that_is_killed_ends_nothing(cluster: Site) -> None:
    """Alone, as the kernel kills it for want of memory, before the first attempt and in it: its helper kills
    the step, and that costs a job. With its helper: the agents do not even notice.
    """

    def kill(host: str, *, with_helper: bool) -> None:
        srun, *helpers = sruns(cluster, host)
        assert helpers
        for pid in (*helpers, srun) if with_helper else (srun,):
            # One may end with the other.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    slow = "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.1, attempt: all}]"
    script = cluster.shared / "told.sh"
    script.write_text(TOLD)
    script.chmod(0o755)
    length = ("train.steps=60", "checkpoint.every_steps=10", f"cluster.container.prefix={script}")
    run = cluster.submit_run("srun-killed", *TWO_NODES, *length, slow)
    first_agent, second_agent = (
        group_folder(run.dir.control, run.job, 0) / f"member-00{node}.json" for node in (0, 1)
    )
    run.wait(first_agent.exists, "the first agent has come")
    host = json.loads(first_agent.read_text())["host"]
    # It would lead, and begin as soon as the second one is there.
    os.kill(run.agent_pid(host), signal.SIGSTOP)
    (run.dir.path / "begin").touch()
    run.wait(second_agent.exists, "both agents have come")
    kill(host, with_helper=False)
    first = run.wait_for_event("requeued", 60)
    assert (first["rule"], first["after"], first["exclude"]) == ("step_not_started", run.job, [])

    run.wait_for_event("checkpoint_committed")
    kill(run.hosts()[0], with_helper=False)
    run.wait_for_attempt(1)
    (_, second) = run.events("requeued")
    assert (second["rule"], second["after"], second["attempt"]) == ("step_lost", first["job"], 0)

    kill(run.hosts()[0], with_helper=True)
    run.assert_state("finished")
    run.assert_job_ends("COMPLETED", job=second["job"])
    assert len(run.events("attempt_started")) == 2


@pytest.mark.timeout(300)
def test_a_node_that_boots_again_at_once_costs_the_run_one_job(cluster: Site) -> None:
    """srun then gives the step up on all nodes, `--no-kill` or not."""
    run = training(cluster, "rebooted", "cluster.spare_nodes=1")
    cluster.heal(run.fail_node(1))
    run.wait_until_finished(200)
    (requeued,) = run.events("requeued")
    assert (requeued["rule"], requeued["after"]) == ("step_lost", run.job)
    run.assert_state("finished")


@pytest.mark.timeout(300)
def test_a_lost_node_that_comes_back_costs_nothing_and_a_page_tells_of_all(
    cluster: Site, tmp_path: Path
) -> None:
    """The job has given it back: what Slurm does with it is its own. Later the loss leaps."""
    slow = SLOW_FIRST_ATTEMPT.partition("[")[2].removesuffix("]")
    leaps = f"recovery.inject=[{slow}, {{attempt: 1, at_step: {SPIKE_AT}, rank: 1, fault: spike}}]"
    back = ("recovery.loss_spike.action=roll_back", "recovery.loss_spike.window=8")
    back += ("recovery.loss_spike.factor=100", "recovery.roll_back.steps_before=4")
    back += ("recovery.straggler_every_steps=2",)
    run = training(cluster, "comes-back", "cluster.spare_nodes=1", leaps, *back)
    run.wait_for_steps(5)
    lost = run.fail_node(1)
    trains_again(run, 1)
    cluster.heal(lost)
    run.wait(lambda: cluster.about_node(lost, "%T") == "idle", "it is free for other jobs")
    run.wait_until_finished(120)
    assert run.events("requeued") == []
    assert len(run.events("attempt_started")) == 3
    run.assert_state("finished")
    page = run.dir.path / "report.html"
    cluster.orchestra("report", run.dir.name)
    (shown,) = data_of(page)["runs"]
    assert_told(run, shown, lost)
    with Browser(tmp_path) as browser:
        assert_sound(browser, page)
        assert [each for each in SECTIONS if not browser.value(f"!!document.getElementById('{each}')")] == []
        for row, found in zip(shown["attempts"], texts(browser, "#attempts tbody tr"), strict=True):
            told = [row[key] for key in ("cause", "host", "rule", "reason") if row["is_failure"]]
            assert [each for each in told if each and each not in found] == [], found
        assert "1 node loss cost" in texts(browser, ".verdict .sentence")[0]


def assert_told(run: SubmittedRun, shown: Record, lost: str) -> None:
    """Hold a page's data to the run's files, read here and not by the product."""
    rows = list(read_json_lines(run.dir.metrics))
    begins = {event["attempt"]: event["step"] for event in run.events("restored")}
    decided = {event["attempt"]: event["rule"] for event in run.events("restarting")}
    gone, leapt, ended = shown["attempts"]
    assert (gone["kind"], gone["host"], gone["hosts"]) == ("node_lost", lost, run.hosts(0))
    assert gone["replaced"] == [[lost, run.hosts(1)[1]]]
    assert (leapt["kind"], leapt["is_planned"], ended["kind"]) == ("loss", True, "finished")
    assert [gone["rule"], leapt["rule"]] == [decided[0], decided[1]]
    reached = [max(row["step"] for row in rows if row["attempt"] == attempt) for attempt in (0, 1)]
    assert gone["lost_steps"] >= reached[0] - begins[1] > 0
    assert (reached[1], leapt["lost_steps"]) == (SPIKE_AT, SPIKE_AT - begins[2])
    last = {row["step"]: row for row in sorted(rows, key=lambda row: row["attempt"])}
    columns = shown["curves"]["columns"]
    assert columns["step"] == sorted(last)
    for key in ("loss", "grad_norm", "tokens_per_s", "step_time_s"):
        assert columns[key] == pytest.approx([last[step][key] for step in columns["step"]], rel=1e-5)
    assert shown["void"]["num_rows"] == len(rows) - len(last)
    (job,) = json.loads(run.dir.record.read_text())["jobs"]
    wall_s = max(event["time"] for event in run.events()) - job["submitted"]
    assert shown["accounts"]["wall_s"] == pytest.approx(wall_s, abs=0.01)
    committed = {(event["attempt"], event["step"]) for event in run.events("checkpoint_committed")}
    saved = [each for each in shown["checkpoints"] if each["state"] == "committed"]
    assert {(each["attempt"], each["step"]) for each in saved} == committed
    assert {each["rank"] for each in shown["heat"]["ranks"]} == {0, 1}


def left_at_once(cluster: Site, *words: str) -> None:
    """Run the command, and press Ctrl-C as soon as it does nothing any more but wait."""
    process = cluster.start_orchestra(*words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stderr is not None
    assert any("Ctrl-C ends the waiting" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, "waits on and judges" in errors) == (130, True), errors


@pytest.mark.timeout(240)
def test_a_run_that_waits_in_the_queue_is_rehearsed_beside_it(cluster: Site) -> None:
    # Submitted and never started: a rehearsal needs nothing but the frozen configuration.
    waits = "cluster.slurm_extra.begin=now+1hour"
    run = cluster.submit_run("precious", *QUICK, "cluster.nodes=2", "cluster.spare_nodes=1", waits)
    faults = ("--fault", "agent_kill", "--fault", "node_down")
    words = ("rehearse", "preci", "cluster.slurm_extra.begin=now", *faults)
    planned = cluster.orchestra(*words, "--dry-run").stdout
    assert "node_down at rank 1" in planned
    assert "#SBATCH --nodes=3" in planned
    faulty = SubmittedRun(cluster, RunDir(run.dir.path.with_name("rehearsal-precious-1-faults")), job="")
    left_at_once(cluster, *words)
    # The jobs go on, and whoever comes back waits for them.
    judgement = json.loads(cluster.orchestra("rehearse", faulty.dir.name, "--json", timeout_s=200).stdout)
    answers = [
        (fault["fault"], fault["decision"], fault["rule"], fault["passed"]) for fault in judgement["faults"]
    ]
    assert answers == [
        ("agent_kill", "restart", "start_again", True),
        ("node_down", "replace", "node_is_gone", True),
    ]
    assert all(check["passed"] for check in judgement["checks"]), judgement["checks"]
    assert len(faulty.events("fault_injected")) == 2
    assert run.events("attempt_started") == []
    again = cluster.orchestra("rehearse", faulty.dir.name)
    assert "precious comes back from what was rehearsed" in again.stdout
