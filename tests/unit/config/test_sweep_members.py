"""A sweep's members: the combinations that Hydra's own sweeper makes, each equal to a run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from orchestra.config.compose import Composed, _composed_once, compose
from orchestra.config.machine import Situation
from orchestra.config.preset_files import own_folder
from orchestra.config.sweep import MOST_MEMBERS, compose_batch, compose_members
from orchestra.errors import ConfigError

ON_CLUSTER = Situation("submit")
CLUSTER = ("cluster=slurm", "cluster.gpus_per_node=8")


def members(*overrides: str) -> list[Composed]:
    return compose_members([*CLUSTER, *overrides], ON_CLUSTER)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        members(*overrides)
    return caught.value.problems


def test_members_that_are_equal_are_refused_and_named() -> None:
    words = "members 000 (train.seed=1 optim.lr=0.001) and 001 (train.seed=1 optim.lr=0.001) are equal"
    (first, second) = problems("train.seed=1,2", "optim.lr=1e-3,0.001")
    assert first == words
    assert second.startswith("members 002 (")
    assert second.endswith("; give each value once")
    assert "; give each value once" in problems("model=debug,llama_125m,debug")[0]
    assert len(members("optim.lr=1e-3,2e-3")) == 2


def hydras_own(overrides: Sequence[str]) -> list[list[str]]:
    """Expand overrides with nothing of ours: Hydra's parser, its loader and its sweeper."""
    with initialize_config_dir(str(own_folder()), job_name="test", version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        (batch,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return batch


SWEEPS = [
    ["optim.lr=1e-4,3e-4", "train.seed=1,2,3", "model=debug,llama_125m"],
    ["model=debug,llama_125m", "optim=adamw,adamw_wsd", "optim.lr=1e-3"],
    ["train.seed=range(3)", "train.steps=range(10,31,10)", "optim.lr=range(0.1,0.4,step=0.1)"],
    ["train.seed=range(start=1,stop=3)", "optim.lr=choice(1e-3,1e-4)"],
    ["optim.lr=sort(3e-4,1e-4,2e-4)", "train.seed=sort(range(3),reverse=true)"],
    ["train.seed=tag(first,range(1,3))", "optim.lr=tag(choice(1e-3,1e-4))"],
    ["optim=glob(*)"],
    ["optim=glob(adamw*,exclude=*wsd)", "model=glob([debug,llama_1*])"],
    ["train.seed=int(1.0,2.0)", "model.name=str(1,2)"],
    ["model.name='a,b','c d',\"e=f\""],
    ["model.name=a\\,b,c", "wandb.tags=[a,b],[c],[]"],
    ["cluster.slurm_extra.licenses=x,y", "++cluster.slurm_extra.reservation=a,b"],
    ["cluster.slurm_extra={mem:1G},{tmp:2G}", "train.seed=1,2", "run.name=night"],
    ["optim.min_lr=null,1e-6", "optim.warmup_steps=null,3", "train.deterministic=true,false"],
    ["train.seed=1", "optim.lr=1e-4,3e-4", "train.seed=5,6", "optim.betas=[0.9,0.95],[0.8,0.9]"],
    ["train.seed=5,6", "optim.lr=1e-4", "train.seed=1"],
    ["cluster.nodes=1,2", "train.micro_batch_size=1,2", "train.global_batch_size=null"],
    ["train=default,pretrain_2k", "train.steps=10,20"],
    ["experiment=demo", "train.steps=100,200", "precision.name=fp32,bf16", "wandb.mode=disabled,offline"],
    ["train.global_batch_tokens=null,8192", "model.name=1e5"],
    ["optim.min_lr=${optim.lr},1e-6", "optim.lr=1e-4,1e-5"],
    ["checkpoint.dir=/store/${train.seed}", "train.seed=1,2"],
    ["train.profile={enabled: true},{steps: [6,8]}", "train.seed=3,4"],
    ["train.steps=7"],
]


def key_of(text: str) -> str:
    return text.partition("=")[0]


def is_sweep(text: str) -> bool:
    return OverridesParser.create().parse_override(text).is_sweep_override()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", SWEEPS, ids=" ".join)
def test_members_are_hydras_own_combinations_and_equal_runs_of_their_own(overrides: list[str]) -> None:
    made, expected = members(*overrides), hydras_own([*CLUSTER, *overrides])
    # The last one of a key counts.
    swept = {key for key, text in {key_of(text): text for text in overrides}.items() if is_sweep(text)}
    assert [member.chosen for member in made] == [
        tuple(text for text in one if key_of(text) in swept) for one in expected
    ]
    for member, theirs in zip(made, expected, strict=True):
        assert [key_of(text) for text in member.overrides] == [key_of(text) for text in theirs]
    for member in (made[0], made[-1])[: len(made)]:
        assert member.config == compose(member.overrides, ON_CLUSTER).config, member.overrides


VALUES = {
    "optim.lr": ["1e-4", "2e-3", "0.5"],
    "optim.min_lr": ["null", "1e-6", "${optim.lr}"],
    "optim.betas": ["[0.9,0.95]", "[0.5,0.6]"],
    "optim": ["adamw", "adamw_wsd"],
    "model.name": ["a", "1e5", "'x y'"],
    "train.seed": ["0", "7"],
    "train.global_batch_size": ["null", "16", "32"],
    "cluster.nodes": ["1", "2"],
    "cluster.exclude": ["[n1]", "[]"],
    "cluster.slurm_extra": ["{mem:1G}", "{tmp:2G}"],
    "cluster.slurm_extra.licenses": ["x", "y"],
    "checkpoint.every_steps": ["null", "5"],
    "wandb.tags": ["[a]", "[b,c]"],
    "train.profile": ["{enabled:true}", "{ranks:[0,1]}"],
}


@st.composite
def sweeps(draw: st.DrawFn) -> list[str]:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4, unique=True))
    several = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=2, unique=True)
    chosen = {key: [VALUES[key][i % len(VALUES[key])] for i in draw(several)] for key in keys}
    return [f"{key}={','.join(dict.fromkeys(values))}" for key, values in chosen.items()]


@settings(max_examples=4)
@given(sweeps(), st.data())
def test_any_member_of_any_sweep_equals_a_run_of_its_own(overrides: list[str], data: st.DataObject) -> None:
    try:
        made = members(*overrides)
    except ConfigError as error:
        # Two values may come to the same: null is what follows from the ranks, a later key overrides a part.
        if not all(" are equal" in problem for problem in error.problems):
            raise
        reject()
    member = data.draw(st.sampled_from(made))
    assert member.config == compose(member.overrides, ON_CLUSTER).config


def test_swept_texts_that_look_like_numbers_stay_as_they_were_typed() -> None:
    made = members("wandb.group=1.10,1.1,null,x", "cluster.account=choice(0123, 1e5)")
    pairs = [(member.config.wandb.group, member.config.cluster.account) for member in made[::2]]
    assert pairs == [("1.10", "0123"), ("1.1", "0123"), (None, "0123"), ("x", "0123")]
    assert made[1].chosen == ("wandb.group=1.10", "cluster.account=1e5")
    for member in made:
        assert member.config == compose(member.overrides, ON_CLUSTER).config


def test_a_shuffled_choice_gives_every_value_once() -> None:
    made = members("train.seed=shuffle(range(6))", "optim.lr=shuffle(1e-4,3e-4)")
    pairs = [(member.config.train.seed, member.config.optim.lr) for member in made]
    assert sorted(pairs) == [(seed, lr) for seed in range(6) for lr in (1e-4, 3e-4)]


def test_presets_of_the_users_own_folder_are_swept_globbed_and_give_all_members_one_name(
    tmp_path: Path,
) -> None:
    for group, header in (("model", ""), ("experiment", "# @package _global_\nrun:\n  ")):
        (tmp_path / group).mkdir()
        for name in ("own_a", "own_b"):
            (tmp_path / group / f"{name}.yaml").write_text(f"{header}name: {name}\n")
    made = members(f"hydra.searchpath=[{tmp_path}]", "model=glob(own_*)")
    assert [member.config.model.name for member in made] == ["own_a", "own_b"]
    assert made[0].config == compose(made[0].overrides, ON_CLUSTER).config
    (problem,) = problems(f"hydra.searchpath=[{tmp_path}]", "experiment=own_a,own_b")
    assert "run.name is not the same for all members (own_a, own_b)" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.lr=interval(1e-5,1e-3)"], ["interval", "hydra/sweeper=NAME", "choice"]),
        (["run.name=a,b"], ["run.name=a,b", "NAME/000", "once"]),
        (["run.dir=a,b"], ["run.dir=a,b", "share"]),
        (["run.metric=loss,mfu"], ["run.metric=loss,mfu", "metric"]),
        (["run={name: a},{name: b}"], ["run={name: a},{name: b}"]),
        (["hydra.searchpath=[/tmp],[/]"], ["several values for a setting of Hydra's"]),
        (["hydra.verbose=true"], ["no effect here"]),
        (["hydra.sweeper.n_trials=3"], ["orchestra submit -m hydra/sweeper=NAME"]),
        (["train.stepz=1,2"], ["train.stepz: no such key; did you mean train.steps?"]),
        (["optim.lr=abc,1e-3"], ["optim.lr=abc: found text, expected a number"]),
        (["model=debug,debgu"], ["model=debgu: no such preset; did you mean model=debug?"]),
        (["model=debug,llama_1b", "model=debug"], ["model=debug: model is chosen twice"]),
        (["model=glob(zz*)"], ["model=glob(zz*)", "no value at all; there are debug"]),
        (["optim.lr=glob(*)"], ["glob() chooses among the presets of a group"]),
        (["train.seed=range(5,1)"], ["train.seed=range(5,1): no value at all"]),
        (["optim.lr=range(0,1,0.0)"], ["never ends"]),
        (["train.seed=shuffle(range(0,1000000000))"], ["1,000,000,000 members", f"{MOST_MEMBERS:,}"]),
        (["train.seed=range(0,200)", "train.steps=range(1,201)"], ["40,000 members"]),
        (["train.seed=choice()"], ["train.seed=choice()"]),
        (["train.seed=range(1,4),7"], ["train.seed=range(1,4),7: a range or a choice", "train.seed=1,2,7"]),
        (["train.seed=1,"], ["train.seed=1,", "cannot be read"]),
        (["checkpoint.dir=s3://x/y", "train.seed=1,2"], ["checkpoint.dir=s3://x/y", "needs its own"]),
        (["parallelism.tp=1,3"], ["parallelism.tp=3 does not divide"]),
    ],
)
def test_what_cannot_be_swept_is_refused_with_what_to_do(overrides: list[str], words: list[str]) -> None:
    found = problems(*overrides)
    assert any(all(word in problem for word in words) for problem in found), found


def test_problems_of_all_members_come_together_with_the_values_they_are_about() -> None:
    found = problems("optim.lr=1e-4,-1", "train.steps=5,0", "train.seed=1,2", "wandb.project=")
    assert sorted(found) == [
        "optim.lr=-1.0 is not a positive number; use one above 0 (with optim.lr=-1)",
        "train.steps=0 is too small; use 1 or more",
        "wandb.project is empty; give a text or leave it out",
    ]
    (combination,) = problems("optim.lr=1e-4,1e-2", "optim.min_lr=1e-5,1e-3")
    assert combination.endswith("(with optim.lr=0.0001 optim.min_lr=0.001)"), "neither is wrong alone"


def test_the_problems_of_a_large_sweep_fit_on_a_screen() -> None:
    found = problems("train.seed=range(-60,0)")
    assert len(found) < 20
    assert found[-1] == "and 48 more problems"
    assert len(problems("train.steps=range(1,7)", "optim.warmup_steps=range(0,9)")) < 20


def test_choices_of_a_sweeper_are_composed_as_given() -> None:
    """A sweeper may set a key in one trial and leave it out of the next."""
    batch = [
        [*CLUSTER, "optim.lr=0.001", "model=debug"],
        [*CLUSTER, "optim.lr=0.1", "model=llama_125m"],
        [*CLUSTER, "train.seed=4", "optim.lr=0.1"],
        [*CLUSTER, "optim.lr=0.2"],
        [*CLUSTER, "model=debug"],
    ]
    made = compose_batch(batch, {"optim.lr", "model", "train.seed"}, ON_CLUSTER)
    assert [member.chosen for member in made] == [tuple(overrides[2:]) for overrides in batch]
    assert [member.config for member in made] == [compose(texts, ON_CLUSTER).config for texts in batch]


def test_hydra_composes_once_for_each_choice_of_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    import hydra

    # What other tests composed is known.
    _composed_once.cache_clear()
    calls: list[object] = []
    own = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *args, **more: (calls.append(args), own(*args, **more))[1])
    made = members("train.seed=range(50)", "model=debug,llama_125m")
    assert (len(made), len(calls)) == (100, 2)
    assert {(m.config.train.seed, m.config.model.name) for m in made} == {
        (seed, model) for seed in range(50) for model in ("debug", "llama_125m")
    }
