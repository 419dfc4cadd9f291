"""`orchestra submit -m` on a real cluster: few arrays, nothing twice, nothing again that is done or alive."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import HELD, TINY, Site, wait_until

from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import SweepDir

pytestmark = pytest.mark.slow

SMALL = (*TINY, "cluster.gpus_per_node=1", "train.steps=2")
# Nothing of it has to run.
WAITING = (*SMALL, HELD)


def swept(cluster: Site, *words: str, **environment: str) -> Record:
    """Submit a sweep and return what the command prints."""
    return dict(json.loads(cluster.orchestra("submit", "-m", *words, "--json", **environment).stdout))


def resumed(cluster: Site, name: str, *, check: bool = True) -> Record:
    return dict(json.loads(cluster.orchestra("resume", name, "--json", check=check).stdout))


def members_of(facts: Record) -> list[list[int]]:
    """Return the members of each array that was submitted."""
    return [array["members"] for array in facts["arrays"]]


def queued_jobs(cluster: Site, name: str) -> list[str]:
    """Return the jobs of a name in the queue, each task of an array for itself."""
    return sorted(cluster.queue("--array", f"--name={name}", "--format=%i", "--states=PENDING,RUNNING"))


def waits_for(cluster: Site, name: str) -> dict[str, str]:
    """Return the jobs that each array of a name begins after."""
    lines = cluster.queue(f"--name={name}", "--format=%F|%E")
    return {
        array: " ".join(sorted(re.findall(r"afterany:(\d+)", jobs)))
        for array, _, jobs in (line.partition("|") for line in lines)
    }


def states(cluster: Site, name: str) -> list[str]:
    return [member["state"] for member in cluster.status(name)["members"]]


def attempts(facts: Record, index: int) -> list[int]:
    run = SweepDir(Path(facts["path"])).member(index)
    return [event["attempt"] for event in read_events(run) if event["event"] == "attempt_started"]


def test_sweep_is_one_array_and_only_its_killed_member_is_run_again(cluster: Site) -> None:
    words = (*SMALL, "run.name=grid")
    facts = swept(cluster, *words, "train.seed=1,2,3")
    assert members_of(facts) == [[0, 1, 2]]
    array = facts["arrays"][0]["id"]
    wait_until(lambda: attempts(facts, 1), "the second member trains", within_s=100)
    cluster.run("scancel", "--signal=KILL", f"{array}_1")
    again = swept(cluster, *words, "train.seed=3,2,1")
    assert again["path"] == facts["path"]
    assert all(1 in members for members in members_of(again)), "the others are done or alive"
    assert [cluster.ended(f"{array}_{task}") for task in (0, 2)] == ["COMPLETED", "COMPLETED"]
    assert cluster.ended(f"{array}_1") != "COMPLETED"
    if not again["arrays"]:
        again = resumed(cluster, "grid")
    assert members_of(again) == [[1]]
    assert cluster.ended(f"{again['arrays'][0]['id']}_0") == "COMPLETED"
    assert states(cluster, "grid") == ["finished"] * 3
    assert [len(attempts(facts, index)) for index in range(3)] == [1, 2, 1]
    assert resumed(cluster, "grid")["arrays"] == swept(cluster, *words, "train.seed=1,2,3")["arrays"] == []


def test_waiting_sweep_returns_every_members_result(cluster: Site) -> None:
    words = (*SMALL, "train.steps=1", "train.seed=1,2", "run.name=waited")
    results = swept(cluster, *words, "--wait")["results"]
    assert [(result["state"], result["metric"]) for result in results] == [("finished", "loss")] * 2
    assert all(result["value"] > 0 for result in results)


def test_each_shape_of_job_has_an_array_and_other_sweeps_runs_are_taken_over(cluster: Site) -> None:
    first = swept(cluster, *WAITING, "train.seed=1,2", "cluster.nodes=1,2", "run.name=shapes")
    assert members_of(first) == [[0, 2], [1, 3]]
    assert len(queued_jobs(cluster, "shapes")) == 4
    larger = ("train.seed=1,2,3", "cluster.nodes=2", "run.name=larger")
    second = swept(cluster, *WAITING, *larger)
    assert members_of(second) == [[2]]
    taken_over = [member["adopted"] for member in second["members"]]
    assert taken_over == [f"{first['path']}/001", f"{first['path']}/003", None]
    assert states(cluster, "larger") == ["queued"] * 3
    forced = swept(cluster, *WAITING, *larger[:2], "run.name=forced", "--force")
    assert members_of(forced) == [[0, 1, 2]]
    taken = ("submit", "-m", *WAITING, "train.seed=7,8", "run.name=shapes")
    cluster.refused(2, "holds another sweep", *taken)


def test_lost_answer_of_sbatch_and_silent_controller_submit_no_second_array(cluster: Site) -> None:
    words = (*WAITING, "train.seed=1,2", "run.name=lossy")
    facts = swept(cluster, *words, **cluster.lost_answer_of_sbatch())
    array = facts["arrays"][0]["id"]
    assert queued_jobs(cluster, "lossy") == [f"{array}_0", f"{array}_1"]
    assert swept(cluster, *WAITING, "train.seed=1,2")["arrays"] == []
    for verb in (("resume", "lossy"), ("submit", "-m", *words)):
        cluster.refused(1, "nothing was submitted", *verb, **cluster.unreachable_controller())


def test_sweep_is_cut_at_the_sites_limits_and_the_rest_submitted_later(new_site: Callable[..., Site]) -> None:
    limits = ("--set", "MaxArraySize=3", "--set", "AccountingStorageEnforce=limits")
    site = new_site("--nodes", "1", "--gpus", "0", *limits)

    manage, user = ("sacctmgr", "--immediate"), site.user.pw_name
    site.as_root(*manage, "add", "user", user, "account=root", "MaxSubmitJobs=5")
    words = (*WAITING, "train.seed=range(0,7)", "run.name=cut", "cluster.array_throttle=2")
    facts = json.loads(site.refused(1, "2 of 7 members were not submitted", "submit", "-m", *words, "--json"))
    assert sorted(index for members in members_of(facts) for index in members) == [0, 1, 2, 3, 4]
    assert max(map(len, members_of(facts))) == 3
    assert states(site, "cut") == ["queued"] * 5 + ["not submitted"] * 2
    # Two lanes of one job at a time; the second array was cut, and its halves stay in its lane.
    first, *halves = (array["id"] for array in facts["arrays"])
    awaited = {first: "", halves[0]: "", **{later: job for job, later in itertools.pairwise(halves)}}
    assert waits_for(site, "cut") == awaited
    site.as_root(*manage, "modify", "user", user, "set", "MaxSubmitJobs=-1")
    wait_until(lambda: members_of(resumed(site, "cut", check=False)) != [], "the limit is lifted")
    assert states(site, "cut") == ["queued"] * 7
    assert len(queued_jobs(site, "cut")) == 7
    (last,) = (jobs for array, jobs in waits_for(site, "cut").items() if array not in awaited)
    assert last == " ".join(sorted(awaited))
    site.cancel_all_jobs()
