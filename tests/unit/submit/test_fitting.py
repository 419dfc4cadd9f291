"""A job that cannot fit is refused, with changes that do make it fit by the count of `orchestra plan`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command_line import CommandLine

from conf.schema import Config
from launchers.slurm.cluster import NodeKind, Partition
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.predict import predict
from orchestra.report.run_state import RunState
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir, SweepMember
from orchestra.run.record import RunPhase
from orchestra.submit.site import Site
from orchestra.submit.submission import Submission, advice, memory_problem, plan, plan_sweep, with_cluster
from orchestra.submit.sweeps.members import MemberRun
from orchestra.submit.sweeps.submit_sweep import MemberChanges, resumed_members

SITUATION = Situation("submit")
NODE = ("cluster.device=cuda", "cluster.gpus_per_node=8", "cluster.hardware=h100", "data=stdlib")
TOO_LARGE = ("model=llama3_8b", "cluster.nodes=1")


def composed(*overrides: str) -> Config:
    return compose(with_cluster([*NODE, *overrides]), SITUATION).config


def problem(*overrides: str) -> str:
    text = memory_problem(composed(*overrides), SITUATION)
    assert text is not None
    return text


def advised(text: str) -> list[list[str]]:
    """Return the overrides of each change that a refusal names."""
    words = text.split("it would fit with ")[1].split("; ")[0]
    return [re.sub(r" \([\d.]+ GiB\)", "", choice).split() for choice in words.split(" or with ")]


@pytest.mark.parametrize(
    "overrides",
    [
        TOO_LARGE,
        ("model=llama3_70b", "cluster.nodes=2"),
        ("model=llama3_405b", "cluster.nodes=2"),
        (
            *("model=llama_1b", "cluster.nodes=1", "train.seq_len=8192"),
            *("train.micro_batch_size=8", "train.global_batch_size=64"),
        ),
    ],
)
def test_every_change_that_is_advised_makes_it_fit(overrides: Sequence[str]) -> None:
    choices = advised(problem(*overrides))
    assert choices
    for changes in choices:
        assert memory_problem(composed(*overrides, *changes), SITUATION) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=debug",),
        (*TOO_LARGE, "parallelism.zero=3", "train.recompute=full"),
        # A device without figures, and no device at all.
        (*TOO_LARGE, "cluster.hardware=auto"),
        (*TOO_LARGE, "cluster.hardware=unknown"),
        (*TOO_LARGE, "cluster.device=cpu"),
        # The ranks find the size of the micro-batch, which one sequence leaves room for.
        ("model=llama_1b", "train.micro_batch_size=auto", "train.seq_len=8192"),
    ],
)
def test_nothing_is_said_where_it_fits_or_the_device_is_not_known(overrides: Sequence[str]) -> None:
    assert memory_problem(composed(*overrides), SITUATION) is None


def test_a_profile_that_cannot_be_read_is_an_error() -> None:
    config = composed(*TOO_LARGE, "cluster.hardware=nowhere.json")
    with pytest.raises(ConfigError, match=r"nowhere.json: No such file"):
        memory_problem(config, SITUATION)


def test_what_is_needed_and_there_is_said_and_the_advice_counts_as_the_framework_does() -> None:
    text = problem(*TOO_LARGE)
    assert "of the h100's 79.6 GiB, 72.5 usable (optimizer " in text
    assert text.endswith("--skip-memory-check submits it all the same")
    config = composed(*TOO_LARGE)
    told = {name: str(advice(config, SITUATION, name)) for name in ("orchestra", "nanotron")}
    assert told["orchestra"] != told["nanotron"]
    for name, text in told.items():
        choices = advised(text)
        assert choices
        for changes in choices:
            assert predict(case_of(composed(*TOO_LARGE, *changes), name)).fits


def test_a_layout_that_only_the_planner_knows_is_advised_on() -> None:
    words = ("model=llama3_8b", "parallelism.cp=2", "precision=bf16", "train.seq_len=8192")
    config = compose(with_cluster([*NODE, *words]), Situation("plan")).config
    assert "it would fit with parallelism.tp=4" in str(advice(config, Situation("plan"), "orchestra"))
    # And none where nothing can be predicted.
    assert advice(composed(*TOO_LARGE, "cluster.device=cpu"), SITUATION, "orchestra") is None


@pytest.mark.parametrize("more", [(), ("-m", "train.seed=1,2")])
def test_submit_refuses_it_unless_told_otherwise(
    more: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["submit", *more, *NODE, *TOO_LARGE, "--dry-run"]
    assert "it would fit with parallelism.zero=2" in orchestra(*words, code=2).err
    orchestra(*words, "--skip-memory-check")


def test_as_many_members_share_a_node_as_fit_and_no_more_are_submitted() -> None:
    node = Partition("main", True, True, "infinite", (NodeKind(4, 96, 8, "idle", frozenset({"h100"})),))
    site = Site((node,), is_dry=True)

    def planned(*overrides: str) -> Submission:
        words = ["cluster.gpus_per_node=1", "cluster.hardware=h100", *overrides]
        member = compose(with_cluster(["cluster.device=cuda", *words]), Situation("submit", cluster=site))
        return plan_sweep([member], words, site, ())

    def members(*overrides: str) -> int | str:
        return planned("cluster.members_per_node=auto", *overrides).members[0].config.cluster.members_per_node

    most = int(members("model=debug"))
    assert most in range(16, 96, 8)
    assert planned("model=debug", f"cluster.members_per_node={most}").members
    with pytest.raises(ConfigError, match=rf"share a GPU, .* at most {most // 8} fit on the"):
        planned("model=debug", f"cluster.members_per_node={most + 8}")
    assert members("model=debug", "cluster.gpus_per_node=3") == 2
    assert members("model=debug", "train.micro_batch_size=auto", "train.global_batch_size=8") == 8


@pytest.mark.parametrize("members", ["16", "auto"])
@pytest.mark.parametrize(
    "shape",
    [
        # A site's file says how members of sweeps lie; none of that is to be said of a single run.
        ("cluster.nodes=4",),
        ("cluster.spare_nodes=1",),
        ("cluster.requeue=chain",),
        ("cluster.gpus_per_node=8",),
        ("cluster.gpus_per_node=1", "train.micro_batch_size=auto", "train.global_batch_size=8"),
        ("cluster.device=cpu", "train.micro_batch_size=auto"),
    ],
    ids=lambda words: words[0],
)
def test_a_single_run_is_judged_and_submitted_as_one_that_shares_no_node(
    shape: Sequence[str], members: str
) -> None:
    kinds = (NodeKind(8, 96, 8, "idle", frozenset({"h100"})),)
    site = Site((Partition("main", True, True, "infinite", kinds),), is_dry=True)
    device = () if "cluster.device=cpu" in shape else ("cluster.device=cuda",)
    words = with_cluster([*device, "cluster.gpus_per_node=2", "model=debug", *shape])
    (of_site,) = plan([*words, f"cluster.members_per_node={members}"], site, ()).members
    (plain,) = plan(words, site, ()).members
    assert (of_site.config, of_site.share) == (plain.config, plain.share)


def test_members_that_go_on_with_changes_are_fitted_as_new_ones_are(tmp_path: Path) -> None:
    node = Partition("main", True, True, "infinite", (NodeKind(4, 96, 8, "idle", frozenset({"h100"})),))
    site = Site((node,), is_dry=True)
    situation = Situation("submit", cluster=site)
    words = [*NODE[:1], "cluster.gpus_per_node=1", *NODE[2:], "model=debug", f"run.dir={tmp_path}"]
    run = RunDir(tmp_path / "000")
    run.path.mkdir()
    write_config(run.config, compose(with_cluster([*words, "train.micro_batch_size=auto"]), situation).config)
    existing = MemberRun(SweepMember(0, "", ()), run, RunState("000", str(run.path), RunPhase.failed, 1))

    def resumed(*overrides: str, checks_memory: bool = True) -> Config:
        changes = MemberChanges(overrides, situation, {}, False, site, checks_memory)
        (member,) = resumed_members([existing], changes)
        assert member.config is not None
        return member.config

    assert resumed("cluster.members_per_node=auto").cluster.members_per_node == 8
    with pytest.raises(ConfigError, match=r"2 members share a GPU, .*micro_batch_size=auto; give a number"):
        resumed("cluster.members_per_node=16")
    large = ("train.micro_batch_size=65536", "train.global_batch_size=65536")
    with pytest.raises(ConfigError, match=r"member 000: memory: a rank would need about"):
        resumed(*large)
    assert resumed(*large, checks_memory=False).train.micro_batch_size == 65536


@pytest.mark.parametrize(
    "word", ["cluster=lab", "+cluster=lab", "cluster.launcher=local", "experiment=demo", "+experiment=demo"]
)
def test_slurm_is_taken_only_where_no_word_chooses_a_cluster(word: str) -> None:
    assert with_cluster([word]) == [word]
    assert with_cluster(["cluster.nodes=2"]) == ["cluster=slurm", "cluster.nodes=2"]


@pytest.mark.parametrize("experiment", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3"])
def test_presets_of_mixtures_fit_and_are_submitted(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    """They name a cluster of their own: nothing else is given but the data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("submit", f"experiment={experiment}", "data.path=s3://bucket/corpus", "run.name=mine")
    assert "srun" in orchestra(*words, "--dry-run").out
