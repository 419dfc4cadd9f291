"""`status`, `logs -f`, `why` and `cancel` of runs and sweeps on a real cluster, with accounting and without.

Jobs that are held cost nothing; one job fails before our code runs, one trains.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import ROOT, Site, wait_until
from test_submit import orchestra, submitted

from orchestra.run.files import Record
from orchestra.run.paths import Sweep, SweepArray, SweepDir, SweepMember, to_json

pytestmark = pytest.mark.slow

HELD = "cluster.slurm_extra.hold=true"
BROKEN = "cluster.setup=['echo the module is not there >&2', 'exit 3']"


@pytest.fixture(params=["accounting", "no accounting"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Return a cluster with accounting, then one without; a test's jobs end with it."""
    if request.param == "accounting":
        yield request.getfixturevalue("cluster")
        return
    site: Site = request.getfixturevalue("site_without_accounting")
    yield site
    site.cancel_all_jobs()


def told(site: Site, *words: str) -> Record:
    (state,) = json.loads(orchestra(site, "status", *words, "--json").stdout)
    return dict(state)


def test_a_job_that_waits_is_told_of_and_taken_out_of_the_queue(site_without_accounting: Site) -> None:
    site = site_without_accounting
    _, job = submitted(site, "held", "train.steps=1", HELD)
    lines = orchestra(site, "status", "held").stdout.splitlines()
    assert lines[1].split()[:2] == ["held", "queued"]
    assert lines[2] == f"reason  held by its user; `scontrol release {job}` lets it go"
    assert lines[3].startswith(f"job     {job}, PENDING")
    assert lines[-1] == "next    `orchestra logs held -f`"
    assert "held by its user" in orchestra(site, "logs", "held").stderr
    planned = orchestra(site, "cancel", "held", "--dry-run").stdout
    assert f"job {job} would be taken out of the queue" in planned
    assert site.job_state(job) == "PENDING"
    assert f"job {job} was taken out of the queue" in orchestra(site, "cancel", "held").stdout
    assert site.job_state(job) == "CANCELLED"
    assert told(site, "held")["state"] == "cancelled"


def test_a_job_that_never_reached_our_code_says_why(site: Site) -> None:
    run, job = submitted(site, "no-module", "train.steps=1", BROKEN)
    follower = following(site, run.name)
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert "the module is not there" in out
    assert f"no-module: failed (job {job})" in err
    state = told(site, run.name)
    assert (state["state"], state["attempts"], state["job_state"]) == ("failed", 0, "FAILED")
    why = orchestra(site, "why", run.name).stdout
    assert f"job {job} failed" in why
    assert "  the module is not there\nlog: runs/no-module/logs/jobs/" in why
    assert "resume  `orchestra resume no-module`" in why


def following(site: Site, run: str) -> subprocess.Popen[str]:
    """Start `logs -f` as the ordinary user."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "orchestra", "logs", run, "-f"],
        cwd=site.shared,
        env={**site.environment, "PYTHONPATH": str(ROOT)},
        user=site.user.pw_uid,
        group=site.user.pw_gid,
        extra_groups=[],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_logs_are_followed_from_the_queue_to_the_end(site_without_accounting: Site) -> None:
    cluster = site_without_accounting
    run, job = submitted(cluster, "followed", "train.steps=400", HELD)
    follower = following(cluster, run.name)
    time.sleep(1)
    cluster.run("scontrol", "release", job)
    wait_until(lambda: told(cluster, "followed")["state"] == "running", "it runs")
    assert told(cluster, "followed")["job_nodes"].startswith("node")
    assert orchestra(cluster, "cancel", "followed").stdout.startswith("followed: attempt 0 asked to save")
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0, err
    assert f"note: followed: queued (job {job}): held by its user" in err
    assert "==> runs/followed/logs/attempt-000/node-000.log <==" in out
    assert told(cluster, "followed")["state"] == "stopped"


def test_members_of_an_array_are_found_by_task_and_cancelled_at_once(site: Site) -> None:
    array = array_of_sleepers(site, "sweep", num_members=6, throttle=2)
    wait_until(lambda: told(site, "sweep")["counts"] == {"starting": 2, "queued": 4}, "two begin")
    state = told(site, "sweep")
    jobs = [(member["job"], member["job_state"]) for member in state["members"]]
    assert jobs == [(f"{array}_{task}", "RUNNING" if task < 2 else "PENDING") for task in range(6)]
    assert told(site, "sweep/4")["cause"] == "waits for other members of its sweep (the array's throttle)"
    assert "taken out of the queue" in orchestra(site, "cancel", "sweep/5").stdout
    assert told(site, "sweep")["counts"] == {"starting": 2, "queued": 3, "cancelled": 1}
    asked = orchestra(site, "cancel", "sweep").stdout
    assert "3 taken out of the queue" in asked
    assert "2 asked to save and stop" in asked
    assert site.job_state(f"{array}_1") == "RUNNING", "what has begun is asked, not killed"
    ended = orchestra(site, "cancel", "sweep", "--now").stdout
    assert "2 ended by Slurm" in ended
    wait_until(lambda: told(site, "sweep")["counts"] == {"cancelled": 6}, "all are cancelled")


def array_of_sleepers(site: Site, name: str, num_members: int, throttle: int) -> str:
    """Submit an array that only sleeps, and record it as the sweep whose members it would train."""
    sweep = SweepDir(site.shared / "runs" / name)
    token, user, now = f"orchestra:{name}{time.time_ns()}", site.user.pw_name, time.time()
    site.run("mkdir", "-p", *(str(sweep.member(index).path) for index in range(num_members)))
    options = (f"--array=0-{num_members - 1}%{throttle}", f"--comment={token}", f"--job-name={name}")
    array = site.submit(*options, "--nodes=1", "--output=/dev/null", "--wrap=sleep 300")
    for index in range(num_members):
        job = {"token": token, "id": None, "name": name, "user": user, "submitted": now, "task": index}
        record = {"name": f"{index:03d}", "sweep": name, "member": index, "pid": None, "jobs": [job]}
        put(site, sweep.member(index).record, json.dumps(record))
    members = tuple(SweepMember(index, str(index), (f"optim.lr={index}e-4",)) for index in range(num_members))
    tasks = tuple(range(num_members))
    arrays = (SweepArray(0, token, 0, tasks, name, user, now, array),)
    put(site, sweep.record, to_json(Sweep(name, "x", ("optim.lr=…",), members, arrays, now)))
    return array


def put(site: Site, file: Path, text: str) -> None:
    site.run("sh", "-c", 'printf %s "$1" > "$0"', str(file), text)


def test_a_silent_controller_leaves_the_records_and_is_said(cluster: Site) -> None:
    run, job = submitted(cluster, "unheard", "train.steps=1", HELD)
    nowhere = cluster.shared / "silent.conf"
    text = cluster.layout.slurm_conf.read_text()
    line = next(line for line in text.splitlines() if line.startswith("SlurmctldHost="))
    nowhere.write_text(text.replace(line, "SlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2"))
    refused = orchestra(cluster, "cancel", "unheard", check=False, SLURM_CONF=str(nowhere))
    assert refused.returncode == 1
    assert "may still wait in the queue" in refused.stdout
    assert cluster.job_state(job) == "PENDING"
    assert list(run.control.glob("attempt-000.stop-*.json"))
