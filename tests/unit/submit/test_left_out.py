"""Jobs are submitted without the nodes that failed before; the user is told which, why, how to undo it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm

from launchers.slurm.cluster import is_usable
from orchestra.doctor import slurm_checks
from orchestra.doctor.check import Mark, Subject, perform
from orchestra.recovery.excluded_hosts import ExcludeList, Listed
from orchestra.submit.hosts_to_avoid import NextJobHosts, bounded, chosen_to_leave_out, left_out
from orchestra.submit.site import hosts_left_out

WORDS = ["cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=2", "run.name=mine"]
NODES = [f"node{number}" for number in range(1, 5)]


def listed(host: str, age_s: float = 60.0) -> Listed:
    now = time.time() - age_s
    return Listed(host, f"{host} failed twice", "runs/first", (1, 2), ("hang", "hang"), now, now + 3600)


@pytest.fixture
def known(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> ExcludeList:
    """A list beside the runs of a cluster whose commands answer; one more node is in another partition."""
    monkeypatch.chdir(tmp_path)
    per_node = "\\n".join([*(f"{node}|main*" for node in NODES), "big1|big"])
    answers = {
        "sinfo": f'case "$*" in *--Node*) printf "{per_node}\\n";; '
        '*) printf "main*|up|infinite|4|2|idle|(null)\\nbig|up|infinite|1|2|idle|(null)\\n";; esac',
        "scontrol": 'echo "ClusterName = alps"',
        "sbatch": "exit 0",
    }
    for name, text in answers.items():
        fake_slurm.put(name, text)
    hosts_left_out.cache_clear()
    return ExcludeList(tmp_path / "runs", "alps")


def exclude_line(said: str) -> str | None:
    return next((line for line in said.splitlines() if "--exclude" in line), None)


def test_a_listed_node_is_excluded_and_the_user_is_told_why(
    known: ExcludeList, orchestra: CommandLine
) -> None:
    known.add(listed("node3"))
    said = orchestra("submit", *WORDS, "cluster.exclude=[node1]", "--dry-run")
    assert exclude_line(said.out) == "#SBATCH --exclude=node1,node3"
    assert "note: without node3: node3 failed twice (run first; until " in said.err
    assert "recovery.exclude_hours=0" in said.err
    plan = orchestra.json("submit", *WORDS, "--dry-run")
    # Only the job leaves it out: the frozen configuration does not hold the list.
    assert ("node3" in plan["script"], "node3" in str(plan["config"])) == (True, False)
    said = orchestra("submit", *WORDS, "recovery.exclude_hours=0", "--dry-run")
    assert "node3" not in said.out + said.err


def test_nobody_is_excluded_without_a_list_or_by_another_clusters(
    known: ExcludeList, tmp_path: Path, orchestra: CommandLine
) -> None:
    assert exclude_line(orchestra("submit", *WORDS, "--dry-run").out) is None
    hosts_left_out.cache_clear()
    ExcludeList(tmp_path / "runs", "jura").add(listed("node3"))
    said = orchestra("submit", *WORDS, "--dry-run")
    assert exclude_line(said.out) is None
    assert "failed" not in said.err


def test_members_of_a_sweep_are_submitted_without_it_too_and_the_user_is_told_once(
    known: ExcludeList, orchestra: CommandLine
) -> None:
    known.add(listed("node3"))
    said = orchestra("submit", "-m", *WORDS, "optim.lr=1e-4,3e-4,1e-3", "--dry-run")
    assert exclude_line(said.out) == "#SBATCH --exclude=node3"
    assert said.err.count("without node3") == 1


def test_so_many_nodes_stay_as_the_job_needs() -> None:
    entries = [listed("node1", 10.0), listed("node2", 20.0), listed("node3", 30.0)]
    left = chosen_to_leave_out(entries, frozenset(NODES), wanted=3)
    assert left.hosts == ("node1",)
    assert left.notes[-1] == "node2, node3 failed before, and may be used: too few other nodes are there"
    assert chosen_to_leave_out(entries, frozenset(NODES), wanted=9).hosts == ()
    # Names that Slurm does not know any more are no words for it.
    entries = [listed("gone1"), listed("node2")]
    assert chosen_to_leave_out(entries, frozenset(NODES), wanted=2).hosts == ("node2",)


def test_nodes_that_the_user_leaves_out_are_no_room_for_others(known: ExcludeList, tmp_path: Path) -> None:
    known.add(listed("node3"))
    assert left_out(tmp_path / "runs", "alps", None, 3).hosts == ("node3",)
    assert left_out(tmp_path / "runs", "alps", None, 3, ["node1"]).hosts == ()


@pytest.mark.parametrize(
    ("states", "wanted", "found"),
    [
        # As many as there is room for, those that failed just now first.
        ("idle idle idle idle", 1, NextJobHosts(("node2", "node3", "node1"))),
        ("idle idle idle idle", 2, NextJobHosts(("node2", "node3"))),
        ("idle allocated mixed idle", 3, NextJobHosts(("node2",), ("node3",))),
        ("idle idle idle idle", 4, NextJobHosts((), ("node2", "node3"))),
        # Slurm does not give those to anybody: neither room, nor in need of it.
        ("idle down idle idle", 2, NextJobHosts(("node2", "node3"))),
        ("idle down idle idle", 3, NextJobHosts(("node2",), ("node3",))),
        ("idle idle* allocated* idle", 2, NextJobHosts(("node2", "node3"))),
        # The job needs one that may come back.
        ("drained idle* idle idle", 3, NextJobHosts((), ("node3",))),
    ],
)
def test_whom_the_next_job_does_not_get(states: str, wanted: int, found: NextJobHosts) -> None:
    words = dict(zip(NODES, states.split(), strict=True))
    failed, before = ["node2", "gone1", "node3", "node2"], ["node1", "node3", "gone2"]
    assert bounded(failed, before, words, wanted) == found
    usable = {host for host, state in words.items() if is_usable(state)}
    assert len(usable - set(found.exclude)) >= min(wanted, len(usable))


@pytest.mark.parametrize(
    ("states", "fewest", "found"),
    [
        # Without those that failed just now fewer nodes will do; for one on the list none is given up.
        ("idle idle idle idle", 2, NextJobHosts(("node2", "node3"), (), True)),
        ("idle allocated mixed idle", 3, NextJobHosts(("node2",), ("node3",), True)),
        ("idle down idle idle", 3, NextJobHosts(("node2",), ("node3",), True)),
        ("idle down down idle", 2, NextJobHosts(("node2", "node3"), (), True)),
        # Even with them there are too few.
        ("idle down down down", 2, NextJobHosts()),
    ],
)
def test_whom_a_job_does_not_get_that_may_have_fewer_nodes(
    states: str, fewest: int, found: NextJobHosts
) -> None:
    words = dict(zip(NODES, states.split(), strict=True))
    assert bounded(["node2", "node3"], ["node1"], words, len(NODES), fewest) == found


def test_a_silent_cluster_is_a_note(known: ExcludeList, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    known.add(listed("node3"))
    fake_slurm.says("sinfo", complains="slurm_load_partitions: refused", code=1)
    left = left_out(tmp_path / "runs", "alps", None, 2)
    assert left.hosts == ()
    assert "are not left out: " in left.notes[0]


def test_doctor_lists_them_with_evidence_and_how_to_take_one_off(known: ExcludeList) -> None:
    known.add(listed("node3"))
    known.file("node4").write_text("{")
    findings = list(perform(slurm_checks.EXCLUDED_CHECKS, Subject(run_dir=Path("runs"))))
    assert [finding.mark for finding in findings] == [Mark.warning, Mark.note]
    assert "node3 of cluster alps until " in findings[0].found
    assert "attempts 1, 2 of run first (hang)" in findings[0].found
    assert f"rm {known.file('node3')}" in findings[0].advice
    known.file("node3").unlink()
    known.file("node4").unlink()
    (last,) = perform(slurm_checks.EXCLUDED_CHECKS, Subject(run_dir=Path("runs")))
    assert (last.mark, last.found) == (Mark.ok, "no node of cluster alps")
    assert list(perform(slurm_checks.EXCLUDED_CHECKS, Subject(run_dir=Path("elsewhere")))) == []
