"""`orchestra submit -m` on a real cluster: few arrays, nothing twice, nothing again that is done or alive."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import ROOT, Site, wait_until
from test_submit import TINY, ended, orchestra

from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import SweepDir

pytestmark = pytest.mark.slow

SMALL = (*TINY, "cluster.gpus_per_node=1", "train.steps=2")
# Nothing of it has to run.
HELD = (*SMALL, "cluster.slurm_extra.hold=true")


def swept(cluster: Site, *words: str, **environment: str) -> Record:
    """Submit a sweep and return what the command says."""
    done = orchestra(cluster, "submit", "-m", *words, "--json", root=ROOT, check=True, **environment)
    return dict(json.loads(done.stdout))


def resumed(cluster: Site, name: str, *words: str, check: bool = True) -> Record:
    return dict(json.loads(orchestra(cluster, "resume", name, *words, "--json", check=check).stdout))


def members_of(facts: Record) -> list[list[int]]:
    """Return the members of each array that was submitted."""
    return [array["members"] for array in facts["arrays"]]


def queued_jobs(cluster: Site, name: str) -> list[str]:
    """Return the jobs of a name in the queue, each task of an array for itself."""
    words = ("squeue", "--noheader", "--array", f"--name={name}", "--format=%i", "--states=PENDING,RUNNING")
    return sorted(cluster.run(*words).stdout.split())


def states(cluster: Site, name: str) -> list[str]:
    (sweep,) = json.loads(orchestra(cluster, "status", name, "--json").stdout)
    return [member["state"] for member in sweep["members"]]


def attempts(facts: Record, index: int) -> list[int]:
    run = SweepDir(Path(facts["path"])).member(index)
    return [event["attempt"] for event in read_events(run) if event["event"] == "attempt_started"]


def test_sweep_is_one_array_and_only_its_killed_member_is_run_again(cluster: Site) -> None:
    words = (*SMALL, "cluster.nodes=2", "run.name=grid")
    facts = swept(cluster, *words, "train.seed=1,2,3")
    assert members_of(facts) == [[0, 1, 2]]
    array = facts["arrays"][0]["id"]
    wait_until(lambda: attempts(facts, 1), "the second member trains", within_s=100)
    cluster.run("scancel", "--signal=KILL", f"{array}_1")
    again = swept(cluster, *words, "train.seed=3,2,1")
    assert again["path"] == facts["path"]
    assert all(1 in members for members in members_of(again)), "the others are done or alive"
    assert [ended(cluster, f"{array}_{task}") for task in (0, 2)] == ["COMPLETED", "COMPLETED"]
    assert ended(cluster, f"{array}_1") != "COMPLETED"
    if not again["arrays"]:
        again = resumed(cluster, "grid")
    assert members_of(again) == [[1]]
    assert ended(cluster, f"{again['arrays'][0]['id']}_0") == "COMPLETED"
    assert states(cluster, "grid") == ["finished"] * 3
    assert [len(attempts(facts, index)) for index in range(3)] == [1, 2, 1]
    assert resumed(cluster, "grid")["arrays"] == swept(cluster, *words, "train.seed=1,2,3")["arrays"] == []


def test_waiting_sweep_returns_every_members_result(cluster: Site) -> None:
    words = (*SMALL, "train.steps=1", "train.seed=1,2", "run.name=waited")
    done = orchestra(cluster, "submit", "-m", *words, "--wait", "--json")
    results = json.loads(done.stdout)["results"]
    assert [(it["state"], it["metric"]) for it in results] == [("finished", "loss")] * 2
    assert all(it["value"] > 0 for it in results)


def test_each_shape_of_job_has_an_array_and_other_sweeps_runs_are_taken_over(cluster: Site) -> None:
    first = swept(cluster, *HELD, "train.seed=1,2", "cluster.nodes=1,2", "run.name=shapes")
    assert members_of(first) == [[0, 2], [1, 3]]
    assert len(queued_jobs(cluster, "shapes")) == 4
    larger = ("train.seed=1,2,3", "cluster.nodes=2", "run.name=larger")
    second = swept(cluster, *HELD, *larger)
    assert members_of(second) == [[2]]
    taken_over = [it["adopted"] for it in second["members"]]
    assert taken_over == [f"{first['path']}/001", f"{first['path']}/003", None]
    assert states(cluster, "larger") == ["queued"] * 3
    forced = swept(cluster, *HELD, *larger[:2], "run.name=forced", "--force")
    assert members_of(forced) == [[0, 1, 2]]
    taken = orchestra(cluster, "submit", "-m", *HELD, "train.seed=7,8", "run.name=shapes", check=False)
    assert (taken.returncode, "holds another sweep" in taken.stderr) == (2, True), taken.stderr


def test_lost_answer_of_sbatch_submits_no_second_array(cluster: Site) -> None:
    wrappers = cluster.shared / "lossy"
    wrappers.mkdir(exist_ok=True)
    sbatch = wrappers / "sbatch"
    lost = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2"
    sbatch.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" > /dev/null 2>&1\n{lost}\nexit 1\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    path = f"{wrappers}:{cluster.environment['PATH']}"
    facts = swept(cluster, *HELD, "train.seed=1,2", "run.name=lossy", PATH=path)
    array = facts["arrays"][0]["id"]
    assert queued_jobs(cluster, "lossy") == [f"{array}_0", f"{array}_1"]
    assert swept(cluster, *HELD, "train.seed=1,2")["arrays"] == []


def test_silent_controller_submits_nothing_again(cluster: Site) -> None:
    words = (*HELD, "train.seed=1,2", "run.name=silent")
    swept(cluster, *words)
    nowhere = cluster.shared / "nowhere.conf"
    text = cluster.layout.slurm_conf.read_text()
    line = next(line for line in text.splitlines() if line.startswith("SlurmctldHost="))
    nowhere.write_text(text.replace(line, "SlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2"))
    for verb in (("resume", "silent"), ("submit", "-m", *words)):
        refused = orchestra(cluster, *verb, check=False, SLURM_CONF=str(nowhere))
        assert (refused.returncode, "nothing was submitted" in refused.stderr) == (1, True), refused.stderr


def test_sweep_is_cut_at_the_sites_limits_and_the_rest_submitted_later(new_site: Callable[..., Site]) -> None:
    limits = ("--set", "MaxArraySize=3", "--set", "AccountingStorageEnforce=limits")
    site = new_site("--nodes", "1", "--gpus", "0", *limits)

    def manage(*words: str) -> None:
        site.devcluster("exec", "controller", "--", "sacctmgr", "--immediate", *words)

    user = site.user.pw_name
    manage("add", "user", user, "account=root", "MaxSubmitJobs=5")
    words = (*HELD, "train.seed=range(0,7)", "run.name=cut")
    told = orchestra(site, "submit", "-m", *words, "--json", check=False)
    assert (told.returncode, "2 of 7 members were not submitted" in told.stderr) == (1, True), told.stderr
    facts = json.loads(told.stdout)
    assert sorted(index for members in members_of(facts) for index in members) == [0, 1, 2, 3, 4]
    assert max(map(len, members_of(facts))) == 3
    assert states(site, "cut") == ["queued"] * 5 + ["not submitted"] * 2
    manage("modify", "user", user, "set", "MaxSubmitJobs=-1")
    wait_until(lambda: members_of(resumed(site, "cut", check=False)) != [], "the limit is lifted")
    assert states(site, "cut") == ["queued"] * 7
    assert len(queued_jobs(site, "cut")) == 7
    site.cancel_all_jobs()
