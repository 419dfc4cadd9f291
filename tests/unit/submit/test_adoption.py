"""Which members of older sweeps a new one takes over: those that computed what it asks for, and no others."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm
from test_sweep_making import NUMBERING, forget_claim, member

from checkpointing.catalog import commit, draft
from checkpointing.manifest import Manifest
from checkpointing.storage import open_storage
from conf.schema import Source
from orchestra.config.machine import signature, this_machine
from orchestra.config.sweep import compose_members
from orchestra.data.token_files import BLOCK_BYTES, TOKENS_FACT, TokenIndex, index_text, tokens_fact
from orchestra.errors import ConfigError
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.record import read_record, write_record
from orchestra.submit.hand_over import SweepLedger, make
from orchestra.submit.site import Site
from orchestra.submit.submission import PlannedMember, Submission, planned_members, planned_sweep
from orchestra.submit.sweeps.arrays import PlacedSubmission
from orchestra.submit.sweeps.members import adoptable_runs, same_sweep, sweeps_in
from orchestra.submit.sweeps.submit_sweep import resume_action, submit_resumed


@pytest.fixture(autouse=True)
def silent_queue(fake_slurm: FakeSlurm) -> FakeSlurm:
    for command in ("squeue", "sacct"):
        fake_slurm.put(command)
    return fake_slurm


def planned(parent: Path, name: str, count: int = 2, tokens: Path | None = None) -> Submission:
    members = []
    for index in range(count):
        one = member(index, parent, name)
        config = one.config
        if tokens is not None:
            data = dataclasses.replace(config.data, source=Source.tokens, path=str(tokens))
            config = dataclasses.replace(config, data=data)
        members.append(PlannedMember(index, signature(config), one.overrides, one.chosen, config, one.share))
    return Submission(tuple(members), ("-m",), ("orchestra", "submit"))


def made(plan: Submission) -> SweepDir:
    ledger, _ = make(PlacedSubmission(plan, planned_sweep(plan, 0.0), NUMBERING))
    assert isinstance(ledger, SweepLedger)
    return ledger.sweep


def finish(run: RunDir, tokens: str | None = None, code: int = 0) -> None:
    """Let a run end, with a checkpoint that names its tokens where it has some."""
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started", nodes=1)
    if tokens is not None:
        storage = open_storage(run.checkpoints)
        state = {"config": {TOKENS_FACT: tokens}}
        place = draft(storage, 4, 0, 0)
        commit(storage, place, Manifest(4, 0, 0.0, {}, {}, {}, state))
        events.write("checkpoint_committed", step=4)
    events.write("failed" if code else "finished", node=0, code=code, cause="x")


def pack_tokens(folder: Path, checksum: int) -> Path:
    """Write the index of token files, by which those that take their place are known from them."""
    index = TokenIndex("uint16", 1000, 1, 257, 256, "bytes", "", BLOCK_BYTES, [checksum])
    (folder / "tokens.json").write_text(index_text(index))
    return folder / "tokens"


def adopted(plan: Submission, parent: Path) -> dict[int, str]:
    found = adoptable_runs(plan, sweeps_in(parent))
    return {index: f"{each.run.path.parent.name}/{each.run.name}" for index, each in found.items()}


def test_members_that_trained_other_tokens_under_the_same_path_are_not_taken_over(tmp_path: Path) -> None:
    tokens = pack_tokens(tmp_path, 1)
    runs = tmp_path / "runs"
    old = made(planned(runs, "old", tokens=tokens))
    fact = tokens_fact(planned(runs, "new", tokens=tokens).members[0].config.data)
    for index in (0, 1):
        finish(old.member(index), fact)
    new = planned(runs, "new", 3, tokens)
    assert adopted(new, runs) == {0: "old/000", 1: "old/001"}
    again = planned(runs, "old", tokens=tokens)
    assert same_sweep(again, sweeps_in(runs)) is not None

    pack_tokens(tmp_path, 2)
    assert adopted(new, runs) == {}
    with pytest.raises(ConfigError, match=r"run.name=old.*trained other tokens than lie under data.path now"):
        same_sweep(again, sweeps_in(runs))
    # A run that has no checkpoint yet, or of files that cannot be read, says nothing of its tokens.
    (tmp_path / "tokens.json").unlink()
    assert adopted(new, runs) == {0: "old/000", 1: "old/001"}


def test_a_member_resumed_with_other_values_is_not_taken_over(tmp_path: Path) -> None:
    old = made(planned(tmp_path, "old"))
    for index in (0, 1):
        finish(old.member(index))
    record = read_record(old.member(1))
    write_record(old.member(1), {**record, "resumes": [{"attempt": 1, "overrides": ["optim.lr=0.5"]}]})
    write_record(old.member(0), {**read_record(old.member(0)), "resumes": [{"attempt": 1, "overrides": []}]})
    assert adopted(planned(tmp_path, "new"), tmp_path) == {0: "old/000"}


def test_what_resume_changes_about_a_whole_sweep_is_not_taken_over_either(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.put("sbatch", "echo 7")
    old = made(planned(tmp_path, "old"))
    forget_claim(old)
    for index in (0, 1):
        finish(old.member(index), code=1)
    (existing,) = sweeps_in(tmp_path)
    action = resume_action(existing, Site(None, is_dry=True), ("optim.weight_decay=0.5",))
    assert action.resume is not None
    submit_resumed(action.resume, ("orchestra", "resume"))
    assert [read_record(old.member(index))["resumes"][0]["overrides"] for index in (0, 1)] == [
        ["optim.weight_decay=0.5"]
    ] * 2
    for index in (0, 1):
        EventWriter(old.member(index), node_writer(1, 0), 1).write("finished", node=0, code=0)
    assert adopted(planned(tmp_path, "new"), tmp_path) == {}


def test_a_dry_run_says_whose_an_adopted_member_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("cluster.gpus_per_node=1", "train.steps=4", "train.seed=1,2")
    old = made(planned_members(compose_members([*words, "run.name=old"], this_machine()), words, ()))
    finish(old.member(1))
    plan = orchestra("run", "-m", *words[:-1], "train.seed=2,3", "run.name=new", "--dry-run").out
    assert "000  train.seed=2  (finished, adopted: it is old/001)\n" in plan
    assert "001  train.seed=3  (to train)\n" in plan
    # Of the very same sweep nothing is adopted.
    plan = orchestra("run", "-m", *words, "run.name=old", "--dry-run").out
    assert "001  train.seed=2  (finished, left alone)\n" in plan


def test_a_member_whose_folder_was_removed_is_made_anew_by_the_sweep_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm.put("sinfo", 'echo "main*|up|infinite|4|8|idle|(null)"')
    fake_slurm.put("scontrol", 'echo "MaxArraySize = 1001"')
    fake_slurm.put("sbatch", "echo 7")
    words = ("submit", "-m", "cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=1", "run.name=s")
    orchestra(*words, "train.seed=1,2")
    sweep = SweepDir(tmp_path / "runs" / "s")
    forget_claim(sweep)
    for index in (0, 1):
        finish(sweep.member(index), code=1)
    shutil.rmtree(sweep.member(1).path)
    told = orchestra("resume", "s", code=2).err
    assert "s/001 is gone; submit the sweep again with its own values (`orchestra submit -m …`)" in told
    orchestra(*words, "train.seed=1,2")
    assert sweep.member(1).config.exists()
    assert [len(read_record(sweep.member(index))["jobs"]) for index in (0, 1)] == [2, 1]


def test_what_was_written_into_a_removed_member_is_told_and_in_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm.put("sinfo", 'echo "main*|up|infinite|4|8|idle|(null)"')
    fake_slurm.put("scontrol", 'echo "MaxArraySize = 1001"')
    fake_slurm.put("sbatch", "echo 7")
    words = ("submit", "-m", "cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=1", "run.name=s")
    orchestra(*words, "train.seed=1,2")
    sweep = SweepDir(tmp_path / "runs" / "s")
    forget_claim(sweep)
    for index in (0, 1):
        finish(sweep.member(index), code=1)
    shutil.rmtree(sweep.member(1).path)
    # Its ranks went on for half a minute.
    sweep.member(1).checkpoints.mkdir(parents=True)
    for command in (("resume", "s"), (*words, "train.seed=1,2")):
        assert "s/001 was removed or renamed" in orchestra(*command, code=2).err
    sweep.member(1).checkpoints.rmdir()
    sweep.member(1).path.rmdir()
    orchestra(*words, "train.seed=1,2")
    assert [len(read_record(sweep.member(index))["jobs"]) for index in (0, 1)] == [2, 1]
