"""Which attempt comes next and with what: from records alone, and for one process only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.run_records import led_here

from conf.schema import BatchStage, Config, RunConfig
from orchestra.agents.choose_nodes import gives_layout, of_next_attempt
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config, write_config
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.paths import RunDir
from orchestra.run.record import fallback_place
from orchestra.submit.claims import is_held
from orchestra.submit.new_run import RunRequest, planned_run, prepare
from orchestra.submit.resume_run import ResumePlan, claim, plan_resume

CPU = Situation("run", num_gpus=0)


OVERRIDES = ("train.steps=60", "checkpoint.every_steps=20")


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(OVERRIDES, CPU).config


@pytest.fixture
def prepared(config: Config, tmp_path: Path) -> RunDir:
    """A run of 60 steps that is about to be started by this process."""
    config = replace(config, run=RunConfig("mine", str(tmp_path)))
    request = RunRequest(config, signature(config), OVERRIDES)
    return prepare(request, planned_run(request, 0.0))


@pytest.fixture
def run(prepared: RunDir) -> RunDir:
    """A run that failed in attempt 0, after it had committed step 20."""
    led_here(prepared, 0, ended=1)
    EventWriter(prepared, rank_writer(0, 0), 0, rank=0).write("checkpoint_committed", step=20)
    return prepared


def planned(run: RunDir, *overrides: str) -> ResumePlan:
    return plan_resume(run, overrides, CPU, time.time())


def refused(run: RunDir, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(run, *overrides)
    return str(caught.value)


def test_the_next_attempt_goes_on_from_the_newest_commit(run: RunDir) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    plan = planned(run)
    assert (plan.number, plan.checkpoint_step, plan.is_finished) == (1, 20, False)
    assert plan.config == plan.before == read_config(run.config)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_batch_of_a_ramp_that_is_over_binds_no_later_layout(config: Config, tmp_path: Path) -> None:
    """16 sequences for 10 steps, then 48, of which alone 6 ranks can have equal shares."""
    tokens = 16 * config.train.seq_len
    ramp = [BatchStage(0, tokens), BatchStage(10 * tokens, 3 * tokens)]
    train = replace(config.train, global_batch_size=None, global_batch_tokens=3 * tokens, batch_ramp=ramp)
    ramped = replace(config, run=RunConfig("ramped", str(tmp_path)), train=train)
    request = RunRequest(ramped, signature(ramped), OVERRIDES)
    run = prepare(request, planned_run(request, 0.0))
    led_here(run, 0, ended=1)
    committed = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    committed.write("checkpoint_committed", step=9)
    said = ("cluster.gpus_per_node=6", "recovery.min_nodes=1")
    assert "train.batch_ramp[0].global_batch_tokens=4096 (16 sequences)" in refused(run, *said)
    assert not gives_layout(of_next_attempt(on_six(ramped), run), 1)
    committed.write("checkpoint_committed", step=10)
    resumed = planned(run, *said).config
    assert resumed.train == ramped.train
    assert gives_layout(of_next_attempt(resumed, run), 1)
    assert not gives_layout(resumed, 1)


def on_six(config: Config) -> Config:
    return replace(config, cluster=replace(config.cluster, gpus_per_node=6))


def test_a_run_without_a_checkpoint_begins_with_attempt_0_and_cannot_be_trained_further(
    prepared: RunDir,
) -> None:
    assert "is being started" in refused(prepared)
    record = json.loads(prepared.record.read_text())
    prepared.record.write_text(json.dumps({**record, "pid_started": record["pid_started"] + 1}))
    plan = planned(prepared)
    assert (plan.number, plan.checkpoint_step) == (0, None)
    led_here(prepared, 0, ended=0)
    assert "recorded no checkpoint" in refused(prepared, "train.steps=200")


def test_a_finished_run_is_finished_unless_more_steps_are_asked_for(run: RunDir) -> None:
    led_here(run, 1, ended=0)
    assert planned(run).is_finished
    assert planned(run, "checkpoint.keep_last=1").is_finished
    plan = planned(run, "train.steps=61")
    assert (plan.is_finished, plan.number, plan.config.train.steps) == (False, 2, 61)


def test_fewer_steps_than_are_committed_are_refused(run: RunDir) -> None:
    assert "train.steps=10 ends before step 20" in refused(run, "train.steps=10")
    assert planned(run, "train.steps=20").config.train.steps == 20


def _put_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")


def test_options_with_which_an_optimizer_keeps_other_state_are_refused(tmp_path: Path) -> None:
    sgd = ("optim.target=torch.optim:SGD", "optim.options.momentum=0")
    config = replace(compose((*OVERRIDES, *sgd), CPU).config, run=RunConfig("sgd", str(tmp_path)))
    request = RunRequest(config, signature(config), OVERRIDES)
    run = prepare(request, planned_run(request, 0.0))
    led_here(run, 0, ended=1)
    EventWriter(run, rank_writer(0, 0), 0, rank=0).write("checkpoint_committed", step=20)
    said = refused(run, "optim.options.momentum=0.9")
    assert said.startswith("optim.options={momentum:0.9}: torch.optim:SGD keeps 4 bytes of state")
    assert planned(run, "optim.options.dampening=0.1").checkpoint_step == 20


def test_a_new_place_is_refused_without_checkpoints_and_with_later_ones_than_asked_for(
    run: RunDir, tmp_path: Path
) -> None:
    place = tmp_path / "elsewhere"
    text = refused(run, f"checkpoint.dir={place}")
    assert f"checkpoint.dir={place} holds no checkpoint" in text
    assert "step 20" in text
    assert str(run.checkpoints) in text
    _put_checkpoint(place, 20)
    assert planned(run, f"checkpoint.dir={place}").config.checkpoint.dir == str(place)
    _put_checkpoint(place, 80)
    assert "train.steps=60 ends before step 80" in refused(run, f"checkpoint.dir={place}")
    assert planned(run, f"checkpoint.dir={place}", "train.steps=80").config.train.steps == 80


def test_a_run_may_not_lose_the_fallback_that_holds_its_newest_checkpoint(
    run: RunDir, tmp_path: Path
) -> None:
    config = read_config(run.config)
    saved = replace(config.checkpoint, fallback_dir=str(tmp_path / "second"))
    run.config.unlink()
    write_config(run.config, replace(config, checkpoint=saved))
    assert planned(run, "checkpoint.fallback_dir=null").config.checkpoint.fallback_dir is None
    second = fallback_place(run, saved.fallback_dir)
    assert second is not None
    _put_checkpoint(Path(second), 20)
    text = refused(run, "checkpoint.fallback_dir=null")
    assert f"step 20, lies in {second}; copy what is in that folder to {run.checkpoints} first" in text
    assert planned(run, "train.steps=70").config.checkpoint.fallback_dir == saved.fallback_dir
    _put_checkpoint(run.checkpoints, 20)
    assert planned(run, f"checkpoint.fallback_dir={tmp_path / 'third'}").checkpoint_step == 20


def test_a_run_that_was_renamed_while_it_trained_is_not_resumed_beside_what_it_saved_since(
    run: RunDir,
) -> None:
    _put_checkpoint(run.checkpoints, 10)
    renamed = RunDir(run.path.rename(run.path.with_name("renamed")))
    assert planned(renamed).checkpoint_step == 20
    # The ranks made the folder of the older name again.
    _put_checkpoint(run.checkpoints, 20)
    text = refused(renamed)
    assert f"step 20, the newest checkpoint of renamed, lies in {run.checkpoints}" in text
    assert f"move what is in {run.checkpoints} to {renamed.checkpoints} first" in text
    _put_checkpoint(renamed.checkpoints, 20)
    assert planned(renamed).checkpoint_step == 20


def _let_claim_die(run: RunDir) -> None:
    """Let the claim of attempt 1 look like one of a process that is no more."""
    content = json.loads(run.claim(1).read_text())
    run.claim(1).write_text(json.dumps({**content, "pid_started": -1}))


def test_a_claim_freezes_the_change_and_keeps_what_was(run: RunDir) -> None:
    old = run.config.read_text()
    claim(planned(run, "train.steps=80"), ["orchestra", "resume", "mine"])
    assert read_config(run.config).train.steps == 80
    assert run.config_of_attempt(0).read_text() == old
    (resumed,) = json.loads(run.record.read_text())["resumes"]
    assert (resumed["attempt"], resumed["overrides"]) == (1, ["train.steps=80"])
    assert {"time", "host", "command", "code_revision"} <= set(resumed)
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_without_overrides_the_configuration_is_left_alone_and_a_dead_claim_is_passed_over(
    run: RunDir,
) -> None:
    before = run.config.stat().st_mtime_ns
    claim(planned(run), [])
    assert run.config.stat().st_mtime_ns == before
    assert not run.config_of_attempt(0).exists()
    _let_claim_die(run)
    assert planned(run).number == 2


def test_of_two_that_planned_the_same_attempt_one_gets_it(run: RunDir) -> None:
    first, second = planned(run, "train.steps=70"), planned(run, "train.steps=90")
    claim(first, [])
    with pytest.raises(ConfigError, match=rf"being resumed already: process {os.getpid()} on .* attempt 1"):
        claim(second, [])
    assert read_config(run.config).train.steps == 70
    assert "being resumed already" in refused(run), "its process lives, though nothing was heard of it"


@pytest.mark.parametrize("content", ["", json.dumps({"host": "elsewhere", "pid": 1})])
def test_a_claim_that_nobody_can_check_counts_for_a_while(run: RunDir, content: str) -> None:
    run.control.mkdir()
    run.claim(1).write_text(content)
    assert "being resumed already" in refused(run)
    long_ago = time.time() - 3600
    os.utime(run.claim(1), (long_ago, long_ago))
    assert planned(run).number == 2


def test_a_claim_of_a_host_whose_clock_ran_ahead_counts_no_longer_than_others(run: RunDir) -> None:
    run.control.mkdir()
    now, file = time.time(), run.claim(1)
    for ahead_s in (-300.0, 300.0, 86_400.0):
        file.write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": now + ahead_s}))
        os.utime(file, (now, now))
        assert is_held(file, now), "it may just have been written"
    # What the file system says of it is another clock's word; here that one was as wrong.
    os.utime(file, (now - 700.0, now - 700.0))
    assert not is_held(file, now)
    os.utime(file, (now + 86_400.0, now + 86_400.0))
    assert not is_held(file, now)


def test_the_configuration_of_an_attempt_that_trained_is_never_overwritten(run: RunDir) -> None:
    old = run.config.read_text()
    claim(planned(run, "train.steps=70"), [])
    _let_claim_die(run)
    claim(planned(run, "train.steps=90"), [])
    assert run.config_of_attempt(0).read_text() == old
    assert read_config(run.config).train.steps == 90


def test_ranks_of_a_killed_command_are_awaited(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestra.submit.resume_run._ORPHANS_END_S", 0.2)
    plan = planned(run)
    words = [sys.executable, "-c", "import time; time.sleep(60)", "orchestra.train", str(run.path)]
    orphan = subprocess.Popen(words)
    try:
        with pytest.raises(ConfigError, match=f"still run .{orphan.pid}.; end them first"):
            claim(plan, [])
    finally:
        orphan.kill()
        orphan.wait()
    claim(replace(plan, number=2), [])


def test_failures_that_were_rehearsed_before_are_dropped(run: RunDir) -> None:
    past, coming = "{at_step: 50, rank: 1}", "{attempt: 1, at_step: 50, rank: 0}"
    config = planned(run, f"recovery.inject=[{past},{coming}]").config
    write_config(run.config, config)
    assert planned(run, "cluster.gpus_per_node=1").config.recovery.inject == [
        {"attempt": 1, "at_step": 50, "rank": 0}
    ]


def test_a_full_disk_is_an_error_and_leaves_the_configuration(run: RunDir) -> None:
    plan, before = planned(run, "train.steps=70"), run.config.read_text()
    run.control.write_text("")
    with pytest.raises(ConfigError, match="cannot be read or written"):
        claim(plan, [])
    assert run.config.read_text() == before
