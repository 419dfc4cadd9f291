"""`status`, `logs -f`, `why` and `cancel` of runs and sweeps on a real cluster, with accounting and without.

Jobs that are held cost nothing; one job fails before our code runs, one trains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import ENDLESS, HELD, Site, wait_until

from orchestra.run.paths import Sweep, SweepArray, SweepDir, SweepMember, to_json

pytestmark = pytest.mark.slow

BROKEN = "cluster.setup=['echo the module is not there >&2', 'false || exit 3']"


@pytest.fixture(params=["accounting", "no accounting"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Return a cluster with accounting, then one without; a test's jobs end with it."""
    if request.param == "accounting":
        yield request.getfixturevalue("cluster")
        return
    site: Site = request.getfixturevalue("site_without_accounting")
    yield site
    site.cancel_all_jobs()


def test_a_job_that_waits_is_told_of_and_taken_out_of_the_queue(site_without_accounting: Site) -> None:
    site = site_without_accounting
    job = site.submit_run("held", "train.steps=1", HELD).job
    lines = site.orchestra("status", "held").stdout.splitlines()
    assert lines[1].split()[:2] == ["held", "queued"]
    assert lines[2] == f"reason  held by its user; `scontrol release {job}` lets it go"
    assert lines[3].startswith(f"job     {job}, PENDING")
    assert lines[-1] == "next    `orchestra logs held -f`"
    assert "held by its user" in site.orchestra("logs", "held").stderr
    planned = site.orchestra("cancel", "held", "--dry-run").stdout
    assert f"job {job} would be taken out of the queue" in planned
    assert site.job_state(job) == "PENDING"
    assert f"job {job} was taken out of the queue" in site.orchestra("cancel", "held").stdout
    assert site.job_state(job) == "CANCELLED"
    assert site.status("held")["state"] == "cancelled"


def test_a_job_that_never_reached_our_code_says_why(site: Site) -> None:
    run = site.submit_run("no-module", "train.steps=1", BROKEN)
    follower = site.start_orchestra("logs", "no-module", "-f")
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert "the module is not there" in out
    assert f"no-module: failed (job {run.job})" in err
    state = run.status()
    assert (state["state"], state["attempts"], state["job_state"]) == ("failed", 0, "FAILED")
    why = site.orchestra("why", "no-module").stdout
    assert f"job {run.job} failed" in why
    assert "  the module is not there\nlog: runs/no-module/logs/jobs/" in why
    assert "resume  `orchestra resume no-module`" in why


def test_logs_are_followed_from_the_queue_to_the_end(site_without_accounting: Site) -> None:
    cluster = site_without_accounting
    job = cluster.submit_run("followed", *ENDLESS, HELD).job
    follower = cluster.start_orchestra("logs", "followed", "-f")
    assert follower.stderr is not None
    assert f"note: followed: queued (job {job}): held by its user" in follower.stderr.readline()
    cluster.run("scontrol", "release", job)
    wait_until(lambda: cluster.status("followed")["state"] == "running", "it runs")
    assert cluster.status("followed")["job_nodes"].startswith("node")
    assert cluster.orchestra("cancel", "followed").stdout.startswith("followed: attempt 0 asked to save")
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0, err
    assert "==> runs/followed/logs/attempt-000/node-000.log <==" in out
    assert cluster.status("followed")["state"] == "stopped"


def test_members_of_an_array_are_found_by_task_and_cancelled_at_once(site: Site) -> None:
    array = array_of_sleepers(site, "sweep", num_members=6, throttle=2)
    wait_until(lambda: site.status("sweep")["counts"] == {"starting": 2, "queued": 4}, "two begin")
    state = site.status("sweep")
    jobs = [(member["job"], member["job_state"]) for member in state["members"]]
    assert jobs == [(f"{array}_{task}", "RUNNING" if task < 2 else "PENDING") for task in range(6)]
    assert site.status("sweep/4")["cause"] == "waits for other members of its sweep (the array's throttle)"
    assert "taken out of the queue" in site.orchestra("cancel", "sweep/5").stdout
    assert site.status("sweep")["counts"] == {"starting": 2, "queued": 3, "cancelled": 1}
    asked = site.orchestra("cancel", "sweep").stdout
    assert "3 taken out of the queue" in asked
    assert "2 asked to save and stop" in asked
    assert site.job_state(f"{array}_1") == "RUNNING", "what has begun is asked, not killed"
    ended = site.orchestra("cancel", "sweep", "--now").stdout
    assert "2 ended by Slurm" in ended
    wait_until(lambda: site.status("sweep")["counts"] == {"cancelled": 6}, "all are cancelled")


def array_of_sleepers(site: Site, name: str, num_members: int, throttle: int) -> str:
    """Submit an array that only sleeps, and record it as the sweep whose members it would train."""
    sweep = SweepDir(site.runs / name)
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
    run = cluster.submit_run("unheard", "train.steps=1", HELD)
    printed = cluster.refused(1, "", "cancel", "unheard", **cluster.unreachable_controller())
    assert "may still wait in the queue" in printed
    assert cluster.job_state(run.job) == "PENDING"
    assert list(run.dir.control.glob("attempt-000.stop-*.json"))
