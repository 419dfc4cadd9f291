"""Whoever may write a run's files acts as its user: others may not, whatever the umask of the shell is."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm

from orchestra.doctor.check import Mark, Subject
from orchestra.doctor.host_checks import CHECKS
from orchestra.run.permissions import closed_to_others, group_problem, loose_folders, open_to_group

OWN_GROUP = grp.getgrgid(os.getegid()).gr_name
SMALL = ("cluster.device=cpu", "cluster.gpus_per_node=2", "run.dir=runs")


@pytest.fixture(params=[0o000, 0o002], ids=["umask 000", "umask 002"], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A cluster that takes every job, and its user's working directory."""
    (tmp_path / "work").mkdir(mode=0o755)
    (tmp_path / "work").chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    fake_slurm.put("sinfo", 'echo "main*|up|infinite|4|8|idle|(null)"')
    fake_slurm.put("scontrol", 'echo "MaxArraySize = 1001"')
    fake_slurm.put("sbatch", "umask > umask-of-the-job; echo 7")
    return fake_slurm


def modes(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in paths}


def open_to_others(folder: Path) -> list[str]:
    return [name for name, mode in modes(folder).items() if mode & 0o022]


@pytest.mark.parametrize("more", [(), ("-m", "train.seed=1,2")], ids=["a run", "a sweep"])
def test_what_is_submitted_can_be_written_by_nobody_else(
    slurm: FakeSlurm, orchestra: CommandLine, more: tuple[str, ...]
) -> None:
    before = os.umask(0o022)
    os.umask(before)
    orchestra("submit", *more, *SMALL, "run.name=mine")
    made = modes(Path("runs"))
    assert {"mine/control", "mine/code/orchestra/__init__.py"} <= set(made)
    assert open_to_others(Path("runs")) == []
    assert Path("umask-of-the-job").read_text() == "0022\n", "the job's own files, too"
    assert os.umask(before) == before, "the caller's own umask stays"


def test_members_of_a_named_group_may_write_and_nobody_else(slurm: FakeSlurm, orchestra: CommandLine) -> None:
    orchestra("submit", *SMALL, "run.name=ours", f"run.group={OWN_GROUP}")
    made = modes(Path("runs/ours"))
    assert all(mode & 0o060 == 0o060 and not mode & 0o002 for mode in made.values())
    assert made["."] & made["control"] & stat.S_ISGID, "what agents make there belongs to the group"
    refused = orchestra("submit", *SMALL, "run.group=nobody-has-it", "--dry-run", code=2).err
    assert "no such group" in refused


def test_checkpoints_outside_of_the_runs_folder_are_the_groups_too(
    slurm: FakeSlurm, orchestra: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "of-all").mkdir(mode=0o755)
    (tmp_path / "of-all" / "other").mkdir(mode=0o755)
    (tmp_path / "mine").mkdir(mode=0o755)
    keys = [f"checkpoint.dir={tmp_path}/mine", f"checkpoint.fallback_dir={tmp_path}/of-all"]
    orchestra("submit", *SMALL, *keys, "run.name=alone")
    assert len(list((tmp_path / "of-all").iterdir())) == 1
    orchestra("submit", *SMALL, *keys, "run.name=ours", f"run.group={OWN_GROUP}")
    made = modes(tmp_path / "of-all")
    (own,) = (name for name in made if name.startswith("ours-"))
    for mode in (made[own], modes(tmp_path / "mine")["."]):
        assert mode & (stat.S_ISGID | 0o072) == stat.S_ISGID | 0o070
    assert not (made["."] | made["other"]) & 0o022, "what others share, and what is in use, stays as it was"
    # Those in the run's or the sweep's own place are made after it.
    for name, words in (("inside", ()), ("inside-sweep", ("-m", "train.seed=1,2"))):
        within = "checkpoint.dir=${run.dir}/${run.name}/saved/${train.seed}"
        orchestra("submit", *words, *SMALL, within, f"run.name={name}", f"run.group={OWN_GROUP}")
        saved = modes(Path("runs") / name / "saved")
        assert len(saved) > 1
        assert all(mode & 0o070 == 0o070 for mode in saved.values())


def test_members_of_a_named_group_may_stop_what_has_not_begun(
    slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    orchestra("submit", "-m", "train.seed=1,2", *SMALL, "run.name=ours", f"run.group={OWN_GROUP}")
    made = modes(Path("runs/ours"))
    for folder in ("000/control", "000/events", "001/control", "001/events"):
        assert made[folder] & 0o070 == 0o070, folder


def test_new_files_are_the_users_alone_or_the_groups(tmp_path: Path) -> None:
    with closed_to_others():
        (tmp_path / "closed").mkdir()
        open_to_group("a group")
        (tmp_path / "open").mkdir()
        open_to_group(None)
        (tmp_path / "closed again").mkdir()
    made = modes(tmp_path)
    assert not (made["closed"] | made["closed again"]) & 0o022
    assert (made["open"] & 0o070, made["open"] & 0o002) == (0o070, 0)


def test_a_resumed_run_of_another_umask_is_closed(slurm: FakeSlurm, orchestra: CommandLine) -> None:
    orchestra("submit", *SMALL, "run.name=old")
    run = Path("runs/old")
    for path in (run, run / "control", run / "code", run / "job.sbatch", run / "config.yaml"):
        path.chmod(0o777)
    slurm.put("squeue", "exit 0")
    slurm.put("sacct", 'echo "7|FAILED|me|1:0|node1|2020-01-01T00:00:00|old|"')
    slurm.put("sbatch", "echo 8")
    orchestra("resume", "old", "--dir", "runs")
    assert [name for name in open_to_others(run) if not name.startswith("code.")] == []


def test_folders_above_that_others_can_write_are_named(tmp_path: Path) -> None:
    runs = tmp_path / "shared" / "team" / "runs"
    runs.mkdir(parents=True)
    for folder in (runs, runs.parent, runs.parent.parent):
        folder.chmod(0o755)
    assert list(loose_folders(runs)) == []
    runs.parent.chmod(0o777)
    (sentence,) = loose_folders(runs / "not yet")
    assert sentence.startswith(f"{runs.parent} can be written by everybody")
    assert f"chmod o-w {runs.parent}" in sentence
    runs.parent.chmod(0o1777)
    assert list(loose_folders(runs)) == [], "as /tmp is"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other groups")
def test_a_group_counts_as_others_unless_it_is_the_runs_or_the_owners_own(tmp_path: Path) -> None:
    other = next(group for group in grp.getgrall() if group.gr_gid not in (0, os.getegid()))
    tmp_path.chmod(0o775)
    assert list(loose_folders(tmp_path)) == [], "root's own group"
    os.chown(tmp_path, -1, other.gr_gid)
    (sentence,) = loose_folders(tmp_path)
    assert f"group {other.gr_name}" in sentence
    assert list(loose_folders(tmp_path, other.gr_name)) == []


def test_a_group_must_be_ones_own() -> None:
    assert group_problem(OWN_GROUP) is None
    assert "no such group" in (group_problem("nobody-has-it") or "")


def test_submit_and_doctor_tell_of_it(slurm: FakeSlurm, orchestra: CommandLine) -> None:
    Path("runs").mkdir()
    Path("runs").chmod(0o777)
    words = "can be written by everybody, who could put other code in a run's place"
    assert words in orchestra("submit", *SMALL, "--dry-run").err
    (look,) = [check.look for check in CHECKS if check.name == "run.dir"]
    found = [finding for finding in look(Subject(run_dir=Path("runs"))) if words in finding.found]
    assert [finding.mark for finding in found] == [Mark.warning]
