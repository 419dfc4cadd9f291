"""The YAML tree: every preset composes, breaks no rule where it can run, and has the parameters it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from orchestra.config.compose import Composed, compose
from orchestra.config.machine import Situation
from orchestra.config.preset_files import GROUPS, Tree, own_folder
from orchestra.sizes.flops import num_parameters

# A machine as the presets are made for: eight GPUs, and a planner that knows every feature.
NODE = Situation("plan", num_gpus=8)
TREE = Tree((own_folder(),))
PRESETS = [(group, preset) for group in GROUPS for preset in TREE.options(group)]


@cache
def composed(group: str, preset: str, situation: Situation) -> Composed:
    needed: list[str] = []
    # What a preset cannot know: the files, or a batch for eight ranks.
    if preset == "tokens" or (group == "experiment" and preset not in ("demo", "mup_small")):
        needed = ["data.path=s3://bucket/corpus"]
    if group == "parallelism" and preset.startswith("tp8_"):
        needed = ["cluster=slurm", "cluster.nodes=8", "cluster.gpus_per_node=8", "train.global_batch_size=64"]
    return compose([f"{group}={preset}", *needed], situation)


@pytest.mark.parametrize(("group", "preset"), PRESETS)
def test_every_preset_composes_breaks_no_rule_and_says_what_it_is_for_and_where_it_ran(
    group: str, preset: str
) -> None:
    assert composed(group, preset, NODE).presets[group] == preset
    lines = (own_folder() / group / f"{preset}.yaml").read_text().splitlines()
    if group == "experiment":
        assert lines.pop(0) == "# @package _global_"
    comment = " ".join(line for line in lines[:2] if line.startswith("#"))
    assert lines[0].startswith("# ")
    assert "Not run" in comment or "Runs on" in comment


# As published.
PARAMETERS = {
    "debug": 808_064,
    "llama_125m": 123_587_328,
    "llama_350m": 359_842_816,
    "llama_1b": 1_235_814_400,
    "llama_3b": 3_212_749_824,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3": 671_026_404_352,
    "gpt2_xl": 1_557_611_200,
    "gpt3_175b": 174_604_259_328,
}


@pytest.mark.parametrize("preset", TREE.options("model"))
def test_models_have_exactly_the_published_parameters(preset: str) -> None:
    config, parameters = composed("model", preset, NODE).config, PARAMETERS[preset]
    assert config.model.name == preset
    assert num_parameters(config.model) == parameters
    assert f"{parameters:,} parameters" in (own_folder() / "model" / f"{preset}.yaml").read_text()


def test_the_demo_runs_here() -> None:
    config = compose(["experiment=demo"], Situation("run", num_gpus=0)).config
    place = (config.model.name, config.cluster.gpus_per_node, config.data.source)
    assert place == ("debug", 2, "stdlib")


def test_the_tree_is_found_beside_the_package_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("foreign: true\n")
    monkeypatch.chdir(tmp_path)
    assert compose([], Situation()).config.model.name == "debug"
