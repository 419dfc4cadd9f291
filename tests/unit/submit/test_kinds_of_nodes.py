"""A run for several kinds of nodes: a job and a configuration for each, and one of them is chosen."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import ME, FakeSlurm, queue_line

from conf.schema import Config
from launchers.slurm.batch_script import NOT_THIS_JOB
from orchestra.agents.alternatives import __main__ as alternatives
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.run.config_file import write_config
from orchestra.run.control.chosen_alternative import NONE, choose_alternative, chosen_alternative
from orchestra.run.paths import RunDir
from orchestra.run.record import newest_job, read_record
from orchestra.submit.site import Site
from orchestra.submit.submission import plan, plan_sweep, with_cluster
from orchestra.submit.sweeps.arrays import placed_run

SITE = Site(None, is_dry=True)
NODE = ("cluster.device=cpu", "cluster.gpus_per_node=2", "train.global_batch_size=8")
KINDS = "cluster.alternatives=[{constraint: fast}, {constraint: slow, nodes: 2, train.micro_batch_size: 1}]"


def test_each_kind_has_its_job_and_its_configuration() -> None:
    submission = plan(with_cluster([*NODE, KINDS]), SITE, ())
    (member,) = submission.members
    configs = [config for config, _ in member.alternatives]
    assert [(config.cluster.constraint, config.cluster.nodes) for config in configs] == [
        ("fast", 1),
        ("slow", 2),
    ]
    assert member.config == configs[0]
    assert configs[1].train.micro_batch_size == 1
    jobs = placed_run(submission, 0.0).arrays()
    scripts = [job.script() for job in jobs]
    assert [job.array.number for job in jobs] == [0, 1]
    for number, (script, kind) in enumerate(zip(scripts, ("fast", "slow"), strict=True)):
        assert f"#SBATCH --constraint={kind}" in script
        first = next(line for line in script.splitlines() if "orchestra.agents.alternatives" in line)
        assert first.endswith(f' {number} || exit "$(( $? == 100 ? 0 : $? ))"')
        assert script.index(first) < script.index("srun")


def test_what_slurm_writes_with_signs_of_its_own_reaches_each_kind() -> None:
    kinds = (
        "{constraint: 'h100&ib', exclude: ['node[1-2]']}, {partition: 'a,b', setup: ['load x, y', ': \"#\"']}"
    )
    (member,) = plan(with_cluster([*NODE, f"cluster.alternatives=[{kinds}]"]), SITE, ()).members
    one, other = (config.cluster for config, _ in member.alternatives)
    assert (one.constraint, one.exclude) == ("h100&ib", ["node[1-2]"])
    assert (other.partition, other.setup) == ("a,b", ["load x, y", ': "#"'])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster.alternatives=[{constraint: fast}]"], "give two kinds of nodes or more"),
        ([KINDS, "cluster=local"], "of a Slurm cluster; leave them out here"),
        ([KINDS, "train.global_batch_size=3"], r"number 1 \(cluster.constraint=slow cluster.nodes=2"),
        ([KINDS.replace("nodes", "nods")], r"number 1 .*nods"),
    ],
)
def test_what_is_wrong_with_one_of_them_is_said_before_anything_exists(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(with_cluster([*NODE, *words]), SITE, ())


def test_a_sweep_is_for_one_kind_of_nodes() -> None:
    member = compose(with_cluster([*NODE, KINDS]), Situation("submit", cluster=SITE))
    with pytest.raises(ConfigError, match="for single runs"):
        plan_sweep([member], [], SITE, ())


def test_the_first_that_starts_is_chosen_once_and_its_job_is_the_runs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    entries = [{"token": token, "alternative": number} for number, token in enumerate("abc")]
    run.record.write_text(json.dumps({"jobs": entries}))
    assert (newest_job(read_record(run)) or {})["token"] == "c"
    assert choose_alternative(run, 1, "7")
    assert not choose_alternative(run, NONE, "8")
    assert chosen_alternative(run) == 1
    assert (newest_job(read_record(run)) or {})["token"] == "b"
    run.record.write_text(json.dumps({"jobs": [*entries, {"token": "later"}]}))
    assert (newest_job(read_record(run)) or {})["token"] == "later"


def test_a_job_goes_by_the_choice_that_stands_and_fails_where_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    for file in (run.config, run.config_of_alternative(0), run.config_of_alternative(1)):
        write_config(file, Config())
    # Job 8 waits beside it, and its submitter withdraws it.
    entries = [{"token": "a", "alternative": 0, "id": None}, {"token": "b", "alternative": 1, "id": "7"}]
    run.record.write_text(json.dumps({"jobs": entries}))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(alternatives, "_READ_PAUSE_S", 0.0)
    assert alternatives.main([str(run.path), "1"]) == EXIT_DONE
    chosen = run.alternative.read_text()
    assert alternatives.main([str(run.path), "0"]) == NOT_THIS_JOB
    # Started again where nothing can be made in the folder.
    monkeypatch.setattr(alternatives, "choose_alternative", refusing)
    monkeypatch.setattr(alternatives, "write_atomically", refusing)
    assert alternatives.main([str(run.path), "1"]) == EXIT_DONE
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(alternatives, "_READ_PAUSE_S", 0.0)
    run.alternative.write_text("")
    for number in ("0", "1"):
        assert alternatives.main([str(run.path), number]) == EXIT_FAILED
        assert "is there and cannot be read" in capsys.readouterr().err
    run.alternative.write_text(chosen)
    assert alternatives.main([str(run.path), "1"]) == EXIT_DONE


def refusing(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_all_jobs_of_a_cancelled_run_are_withdrawn_those_too_whose_id_was_lost(
    tmp_path: Path, orchestra: CommandLine, fake_slurm: FakeSlurm
) -> None:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    own = {"name": "mine", "user": ME, "submitted": time.time(), "attempt": 0}
    entries = [
        {**own, "token": "orchestra:a", "alternative": 0, "id": "7"},
        {**own, "token": "orchestra:b", "alternative": 1, "id": None},
    ]
    run.record.write_text(json.dumps({"name": "mine", "pid": None, "jobs": entries}))
    lines = [queue_line(job, "PENDING", "mine", token=f"orchestra:{each}") for job, each in ("7a", "8b")]
    fake_slurm.says("squeue", prints="\n".join(lines))
    fake_slurm.says("sacct")
    fake_slurm.put("scancel", f"echo > {fake_slurm.folder}/squeue.out")
    orchestra("cancel", str(run.path))
    assert chosen_alternative(run) == NONE
    (call,) = fake_slurm.calls("scancel")
    assert {"7", "8"} <= set(call.split())
