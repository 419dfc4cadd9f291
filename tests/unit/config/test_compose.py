"""Overrides in Hydra's syntax: what they give, and how everything wrong with them is reported at once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.schema import ClusterConfig, Config, Device, PrecisionName, Schedule
from orchestra.config.compose import compose
from orchestra.config.keys import known_keys, written
from orchestra.config.machine import Situation
from orchestra.config.preset_files import GROUPS
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config, to_yaml, write_config

HERE = Situation("run", num_gpus=0)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, HERE)
    return caught.value.problems


def test_groups_and_values_are_overridden_in_hydras_syntax() -> None:
    overrides = ["precision=bf16", "optim=adamw_wsd", "train.steps=7", "optim.betas=[0.8,0.9]"]
    made = compose([*overrides, "+cluster.slurm_extra.qos=x"], HERE)
    assert made.config.precision.name is PrecisionName.bf16
    assert made.config.optim.schedule is Schedule.wsd
    assert made.config.optim.betas == [0.8, 0.9]
    assert made.config.train.steps == 7
    assert made.config.cluster.slurm_extra == {"qos": "x"}
    assert made.presets["optim"] == "adamw_wsd"
    assert made.overrides[0] == "precision=bf16"


def test_free_dictionaries_take_new_keys_with_and_without_a_plus() -> None:
    for override in (
        "cluster.slurm_extra.qos=x",
        "++cluster.slurm_extra.qos=x",
        "cluster.slurm_extra={qos: x}",
    ):
        assert compose([override], HERE).config.cluster.slurm_extra == {"qos": "x"}


def test_an_override_beats_an_experiment_and_an_experiment_beats_its_presets() -> None:
    config = compose(["experiment=demo", "train.steps=5", "optim.warmup_steps=1"], HERE).config
    assert (config.train.steps, config.train.global_batch_size) == (5, 16)


def test_a_range_of_nodes_says_how_many_a_job_begins_with_and_may_go_on_with() -> None:
    situation = Situation("submit", num_gpus=0)
    overrides = ("cluster=slurm", "cluster.nodes=2..4", "cluster.device=cpu", "cluster.time_limit=1h")
    config = compose(overrides, situation).config
    assert (config.cluster.nodes, config.cluster.min_nodes, config.recovery.min_nodes) == (4, 2, 2)
    config = compose((*overrides, "recovery.min_nodes=1"), situation).config
    assert (config.cluster.min_nodes, config.recovery.min_nodes) == (2, 1)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner),
        max_leaves=4,
    )
)
def test_a_value_is_written_as_hydra_reads_it(value: object) -> None:
    text = written(value)
    override = OverridesParser.create().parse_override(f"cluster.slurm_extra.x={text}")
    assert not override.is_sweep_override()
    assert override.value() == value, text


def test_the_batch_size_that_was_said_last_counts() -> None:
    tokens = compose(["train.global_batch_tokens=8192"], HERE).config.train
    assert (tokens.global_batch_size, tokens.global_batch_tokens) == (None, 8192)
    sequences = compose(["train=pretrain_2k", "train.global_batch_size=4"], HERE).config.train
    assert (sequences.global_batch_size, sequences.global_batch_tokens) == (4, None)
    assert problems("train.global_batch_size=4", "train.global_batch_tokens=8192") == [
        "train.global_batch_size and train.global_batch_tokens are both given; give one of them"
    ]


@pytest.mark.parametrize(
    "name", ["2026_11_21", "1e5", "1.10", "true", "False", "007", "1_0.5", "nan", "-1", "0x10", "+5", "v1"]
)
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(name: str) -> None:
    overrides = [f"model.name={name}", f"cluster.account={name}", f"wandb.tags=[a, {name}]"]
    if name in ("2026_11_21", "1e5", "1.10", "true"):
        # The name of a folder too.
        overrides.append(f"run.name={name}")
    made = compose(overrides, HERE)
    assert (made.config.model.name, made.config.cluster.account) == (name, name)
    assert made.config.wandb.tags == ["a", name]
    assert made.config.run.name == (name if len(overrides) == 4 else None)
    assert made.overrides[0] == f"model.name={name}"


def test_a_run_and_a_preset_may_be_called_by_a_date(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "2026_11_21.yaml").write_text("name: dated\n")
    overrides = [f"hydra.searchpath=[{tmp_path}]", "model=2026_11_21", "++run.name=2026_11_21"]
    made = compose(overrides, HERE)
    assert (made.config.model.name, made.presets["model"]) == ("dated", "2026_11_21")
    assert made.config.run.name == "2026_11_21"
    assert compose(["run.name=null"], HERE).config.run.name is None


def test_the_batch_fits_the_ranks_unless_its_size_was_given() -> None:
    assert compose(["cluster.gpus_per_node=3"], HERE).config.train.global_batch_size == 18
    assert "=15 or 18" in problems("cluster.gpus_per_node=3", "train.global_batch_size=16")[0]
    kept = compose(["train=pretrain_2k", "train.global_batch_size=null"], HERE).config.train
    assert (kept.global_batch_size, kept.global_batch_tokens) == (None, 524288)


@pytest.mark.parametrize(("typed", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_compile_is_a_truth_value_or_auto_in_overrides_presets_and_frozen_runs(
    tmp_path: Path, typed: str, value: bool | str
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text(f"compile: {typed}\n")
    of_preset = compose([f"hydra.searchpath=[{tmp_path}]", "train=mine"], HERE).config
    of_override = compose([f"train.compile={typed}"], HERE).config
    assert of_preset.train.compile == of_override.train.compile == value
    write_config(tmp_path / "config.yaml", of_override)
    # As runs wrote it before there was `auto`, too.
    assert f"compile: {typed}\n" in (tmp_path / "config.yaml").read_text()
    assert read_config(tmp_path / "config.yaml") == of_override


def test_a_model_that_inherits_from_another_one_has_its_own_name(tmp_path: Path) -> None:
    presets = {
        "model/mine": "defaults: [debug]\nhidden_size: 256\n",
        "model/named": "defaults: [debug]\nname: other\n",
        "experiment/tiny": (tiny := "# @package _global_\ndefaults: [{override /model: mine}]\n"),
        "experiment/called": f"{tiny}model: {{name: ours}}\n",
    }
    for preset, text in presets.items():
        (tmp_path / preset).parent.mkdir(exist_ok=True)
        (tmp_path / f"{preset}.yaml").write_text(text)

    def name(*overrides: str) -> str:
        return compose([f"hydra.searchpath=[{tmp_path}]", *overrides], HERE).config.model.name

    assert (name("model=mine"), name("model=named"), name()) == ("mine", "other", "debug")
    assert (name("experiment=tiny"), name("experiment=called")) == ("mine", "ours")
    assert name("model=mine", "model.name=said") == "said"


def test_a_refused_value_is_not_blamed_for_being_missing() -> None:
    found = problems("data=tokens", "data.blend=[{path: x, wieght: 2}]")
    assert found == ["data.blend[0].wieght: no such key; did you mean weight?"]
    assert len(problems("data=tokens", "data.path=a(b")) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hiden_size=3", ["did you mean model.hidden_size?"]),
        ("lr=3", ["lr: no such key; did you mean optim.lr?"]),
        ("train.lr=3", ["did you mean optim.lr?"]),
        ("model.batch_size=3", ["batch_size"]),
        ("modell=debug", ["did you mean model?"]),
        ("train.zzzzzz=3", ["train has steps, tokens, seq_len"]),
        ("+optim.foo=3", ["optim.foo: no such key"]),
        ("train.steps=1.5", ["found a number", "expected a whole number"]),
        ("train.steps=true", ["found true or false", "expected a whole number"]),
        ("train.steps=null", ["found null"]),
        ("train.steps=[1]", ["found a list"]),
        ("train.compile=maybe", ["train.compile='maybe'", "use auto, true or false"]),
        ("train.compile=1", ["expected true, false or auto, e.g. train.compile=auto"]),
        ("train.recompute=some", ["expected one of none, selective, full"]),
        ("precision.reduce_dtype=fp64", ["one of fp32, bf16, fp16 or null"]),
        ("optim.betas=0.9", ["expected a list, each element a number", "optim.betas=[0.9,0.95]"]),
        ("optim.betas=[[0.9],0.95]", ["optim.betas[0]=[0.9]: found a list, expected a number"]),
        ("parallelism.stages=[2,[2]]", ["parallelism.stages[1]=[2]: found a list, expected a whole number"]),
        ("wandb.tags=[{a: b}]", ["wandb.tags[0]={a:b}: found a section {…}, expected text"]),
        ("cluster.account=", ["cluster.account is empty"]),
        ("cluster.container.prefix=' '", ["cluster.container.prefix is empty"]),
        ("data.blend=[{pth: x}]", ["data.blend[0].pth: no such key; did you mean path?"]),
        ("data.blend=[x]", ["a list of {path, weight, name}"]),
        ("train.steps=", ["train.steps is empty; expected a whole number, e.g. train.steps=100"]),
        ("cluster.gpus_per_node=", ["cluster.gpus_per_node is empty; expected a whole number or auto"]),
        ("run.name=", ["run.name is empty"]),
        ("model=", ["model is empty; there are debug"]),
        ("run.name=ünï", ["run.name=ünï cannot name a directory", "letters (A to Z, a to z)"]),
        ("optim.lr=" + "9" * 400, ["optim.lr=999"]),
        ("cluster.slurm_extra=x", ["{name: value}"]),
        ("parallelism.dp=2.5", ["a whole number or auto"]),
        ("train.profile=true", ["train.profile is a section; set one of train.profile.enabled"]),
        ("train.profile={enabledd: true}", ["train.profile.enabledd: no such key"]),
        ("optim.lr.x=3", ["optim.lr.x: no such key"]),
        ("model=llama3_9b", ["no such preset; did you mean model=llama3_8b?", "gpt3_175b"]),
        ("precision=int4", ["precision=int4: no such preset", "bf16_fp32_grad"]),
        ("model={hidden_size: 3}", ["takes the name of a preset", "model.key=value"]),
        ("model@foo=debug", ["write model=debug"]),
        ("foo/bar=debug", ["no such group"]),
        ("+experiment=demo", ["write experiment=demo"]),
        ("+optim.lr=2", ["optim.lr exists already; write optim.lr=2"]),
        ("~optim.lr", ["cannot be deleted", "optim.lr=0.0003"]),
        ("~optim.foo", ["optim.foo: no such key"]),
        ("run.metric=los", ["run.metric=los", "did you mean loss?", "tokens_per_s"]),
        ("hydra/sweeper=optuna", ["hydra/sweeper=optuna", "orchestra submit -m"]),
        ("optim.lr=1,2", ["several values", "orchestra submit -m"]),
        ("model=debug,llama_1b", ["several values", "orchestra submit -m"]),
        ("train.steps=range(1,3)", ["several values"]),
        ("cluster.partition=a,b", ["one with commas in it is written \"cluster.partition='a,b'\""]),
        ("cluster.exclude=a,b", ["a list is written cluster.exclude=[…]"]),
        ("train.steps=10,000", ["several values for one run; give one value; `orchestra run -m`"]),
        ("cluster.exclude=node1", ["expected a list", "write cluster.exclude=[node1]"]),
        ("cluster.setup=source ~/it's", ["cannot be read"]),
        ("cluster.setup='source ~/it\\'s'", ["write cluster.setup=['source ~/it\\'s']"]),
        (
            "cluster.setup=['a ${HOME}']",
            ["a variable of the shell is written $HOME or \\${HOME}"],
        ),
        ("++model=debug", ["write model=debug"]),
        ("optim.LR=1", ["optim.LR: no such key; did you mean optim.lr?"]),
        ("model=Llama_1B", ["did you mean model=llama_1b?"]),
        ("hydra.run.dir=x", ["Hydra's own settings"]),
        ("hydra.searchpath=[nowhere]", ["is not a folder"]),
        ("--multirun", ["not an option"]),
        ("train.steps", ["write key=value"]),
        ("=", ["cannot be read"]),
        ("data.path=a(b", ["cannot be read", "quotes"]),
        ("train.steps=${train.stepz}", ["train.steps: Interpolation key 'train.stepz' not found"]),
        ("train.steps=???", ["train.steps: no value given"]),
    ],
)
def test_a_mistake_is_explained_in_one_line(override: str, words: Sequence[str]) -> None:
    found = problems(override)
    assert any(all(word in problem for word in words) for problem in found), found
    assert not any("\n" in problem for problem in found)


def test_a_preset_that_is_missing_or_chosen_twice_is_the_only_problem_told() -> None:
    assert len(problems("model=llama3_9b", "parallelism.tp=3")) == 1
    assert any("chosen twice" in problem for problem in problems("model=debug", "model=llama_1b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {stepz: 3}", ["train.stepz: no such key; did you mean train.steps?"]),
        ("train: {seq_len: abc}", ["train.seq_len=abc: found text, expected a whole number"]),
        ("optim: 3", ["optim is a section"]),
        ("defaults: [{override /model: nope}]", ["nope: no such preset", "debug"]),
        ("defaults: [{override /modl: debug}]", ["no such group"]),
        ("defaults: [{model: debug}]", ["override /model: debug"]),
        ("train: [", ["mine.yaml"]),
        ("cluster:\n  time_limit: 4:00:00", ['time_limit: "4:00:00"']),
        ("optim: {lr: '${nothing}'}", ["optim.lr: Interpolation key 'nothing' not found"]),
    ],
)
def test_a_mistake_inside_a_file_names_the_file(tmp_path: Path, text: str, words: Sequence[str]) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{text}\n")
    (problem,) = problems(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")
    assert all(word in problem for word in words), problem
    assert "Interpolation" in problem or str(file) in problem


def test_a_text_that_yaml_takes_for_a_section_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "lab.yaml").write_text("launcher: slurm\nsetup:\n  - echo starting: here\n")
    (problem,) = problems(f"hydra.searchpath=[{tmp_path}]", "cluster=lab")
    assert "cluster.setup[0]={echo starting:here}: found a section" in problem
    assert "in quotes" in problem


def test_presets_that_lead_back_to_themselves_are_named(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("defaults: [mine]\n")
    (problem,) = problems(f"hydra.searchpath=[{tmp_path}]", "optim=mine")
    assert "optim=mine" in problem
    assert "leads back to itself" in problem


def test_an_experiment_without_its_package_line_is_explained(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("train: {steps: 3}\n")
    assert "# @package _global_" in problems(f"hydra.searchpath=[{tmp_path}]", "experiment=mine")[0]


words = st.one_of(st.sampled_from([*known_keys(), *GROUPS]), st.text(max_size=12))
values = st.one_of(
    st.sampled_from(
        ["null", "true", "[]", "{}", "[1,2]", "{a: 1}", "???", "${x}", "1e400", "-1", "0", "nan", "debug"]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=12),
)
signs = st.sampled_from(["", "", "", "+", "++", "~", "--"])


@settings(max_examples=20)
@given(
    st.lists(
        st.builds("{}{}{}{}".format, signs, words, st.sampled_from(["=", "=", "=", ""]), values), max_size=3
    )
)
def test_whatever_is_typed_nothing_but_a_config_error_comes_out(overrides: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        compose(overrides, HERE)


def test_a_frozen_configuration_keeps_what_only_looks_like_a_number(tmp_path: Path) -> None:
    overrides = ["checkpoint.every_steps=auto", "recovery.inject=[{at_step: 100, rank: 0, fault: nan}]"]
    config = compose(overrides, HERE).config
    write_config(tmp_path / "config.yaml", config)
    for read in (config, read_config(tmp_path / "config.yaml")):
        assert read.checkpoint.every_steps == "auto"
        assert read.recovery.inject == [{"at_step": 100, "rank": 0, "fault": "nan"}]


TEXTS = (
    *("1e-4", "1e5", "0x1f", "12:30:00", "1_000", "nan", ".inf", "007", "2024-01-01"),
    *("on", "No", "true", "null", "~", "", " a ", "a: b", "#", "-", "[a]", "%", "@x"),
    *("ümlaut", "line\nbreak", "'quoted'"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_look_like_something_else_stay_texts(text: str, tmp_path: Path) -> None:
    extra = {"reservation": text, "nested": [text, {"deep": text}], "number": 3, "part": 1e-5, "flag": True}
    cluster = ClusterConfig(partition=text, device=Device.cpu, setup=[text, text], slurm_extra=extra)
    config = dataclasses.replace(Config(), cluster=cluster)
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.structured(config))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
