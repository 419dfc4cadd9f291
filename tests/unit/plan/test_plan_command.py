"""`orchestra plan` as it is typed: one layout, tables, what --exact compares, and what is refused."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest
from plan_cases import PlanCommand, row, write_table

from orchestra.cli.plan.exact_mode import Compared, comparison_lines
from orchestra.sizes.network import Measured, measured_file, write_measured

MODEL = ("model.hidden_size=256", "model.num_hidden_layers=2", "train.seq_len=128", "precision=bf16")


@pytest.mark.parametrize("experiment", ["llama3_70b", "llama3_8b", "llama_1b", "llama_125m"])
def test_shipped_experiments_can_be_planned_without_their_data(experiment: str, plan: PlanCommand) -> None:
    sizes = ["cluster.hardware=h100", "cluster.gpus_per_node=8", "cluster.device=cuda"]
    assert "tokens/s per device" in plan.text(f"experiment={experiment}", *sizes)


def test_usable_memory_stands_beside_all_of_it(plan: PlanCommand) -> None:
    text = plan.text("model=llama3_405b", "parallelism=tp8_pp4", "cluster.nodes=4", code=1)
    memory = r"^memory  .* of 79.6 GiB, 72.5 usable, stage \d of 4: does not fit$"
    assert re.search(memory, text, re.MULTILINE)
    for word in ("optimizer state", "pipeline bubble", "MFU", "HFU", "GPU-hours"):
        assert word in text
    assert plan.notes.startswith("note: ")
    # Advised on too: a layout that submit refuses.
    plan.text("model=llama3_8b", "parallelism.cp=2", "precision=bf16", "train.seq_len=8192", code=1)
    assert "note: it would fit with " in plan.notes


def test_the_other_convention_stands_beside_the_mfu_of_long_sequences_alone(plan: PlanCommand) -> None:
    words = ("model=llama_1b", "precision=bf16", "train.recompute=full")
    long = (*words, "train.seq_len=65536")
    facts = plan.facts(*long)
    said = re.search(r"^ +MFU (.*)% with causal attention counted as half$", plan.text(*long), re.M)
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * facts["mfu_causal"], abs=0.1)
    assert facts["mfu_causal"] < 0.7 * facts["mfu"]
    assert "causal" not in plan.text(*words, "train.seq_len=1024")


def test_each_axis_is_shown_with_the_links_that_it_uses(plan: PlanCommand) -> None:
    words = ("model=llama3_8b", "parallelism=tp8_pp4", "cluster.nodes=8", "precision=bf16")
    text = plan.text(*words, "parallelism.schedule=interleaved", "parallelism.virtual_stages=2")
    assert "zero 1, sequence parallel\n        schedule interleaved with 2 stages a rank\n" in text
    links = [line[8:] for line in text.splitlines() if " a device" in line]
    assert links == [
        "tp 8: inside a node, 450 GB/s a device",
        "dp 2: across 2 nodes, 42.5 GB/s a device",
        "pp 4: across 4 nodes, 42.5 GB/s a device",
    ]
    assert plan.facts(*words)["links"][-1] == {"axis": "pp", "degree": 4, "num_nodes": 4}


def test_what_a_network_reaches_is_predicted_with_and_measured_figures_hold_where_none_are_given(
    plan: PlanCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("model=llama3_8b", "precision=bf16", "train.seq_len=8192", "parallelism=tp8", "cluster.nodes=2")
    lab = ("cluster=slurm", "cluster.device=cuda", "cluster.gpus_per_node=8", "cluster.hardware=h100")
    names = ("intra_node_bytes_per_s", "inter_node_bytes_per_s")
    given = [f"cluster.network.{name}={rate}" for name, rate in zip(names, ("5e9", "1e9"), strict=True)]
    usual, slow = plan.facts(*words)["step_time_s"], plan.facts(*words, *given)["step_time_s"]
    assert slow > 2 * usual
    assert "dp 2: across 2 nodes, 1 GB/s a device" in plan.text(*words, *given)
    inside_only = plan.facts(*words, given[0])["step_time_s"]
    assert usual < inside_only < slow
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
    figures = {names[0]: 5e9, names[1]: 1e9}
    measured = Measured("cuda", "nccl", "ib0", ("node1", "node2"), 8, 1.7e9, **figures)
    write_measured(measured_file(os.environ, "lab"), measured)
    assert plan.facts(*words, *lab)["step_time_s"] == slow
    assert plan.facts(*words)["step_time_s"] == usual, "of assumed machines nothing was measured"
    assert plan.facts(*words, *lab, "cluster.network.inter_node_bytes_per_s=42.5e9")["step_time_s"] < slow
    searches = ("--search", *words, *lab, "parallelism.pp=1", "parallelism.cp=1", "parallelism.tp=8")
    speeds = []
    for file in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setenv("XDG_DATA_HOME", str(file))
        speeds.append(plan.facts(*searches)["layouts"][0]["tokens_per_s"])
    assert speeds[0] < 0.6 * speeds[1]


def test_a_mixture_s_name_and_sizes_are_no_wider_than_a_terminal(plan: PlanCommand) -> None:
    text = plan.text("model=mixtral_8x7b", "precision=bf16_fp32_grad", code=1)
    assert "active,\n        bf16_fp32_grad\n" in text


def test_ranks_that_share_a_device_share_its_memory(plan: PlanCommand) -> None:
    words = ("model=llama_125m", "cluster=local", "cluster.device=cuda", "cluster.hardware=h100")
    alone = plan.text(*words, "cluster.gpus_per_node=4")
    shared = plan.text(*words, "cluster.gpus_per_node=4", "cluster.share_devices=true")
    assert shared == alone.replace(" of 79.6 GiB, 72.5 usable", " of 19.9 GiB, 18.1 usable") != alone


def test_an_idle_stage_is_named_and_no_memory_advised(plan: PlanCommand) -> None:
    words = ("--framework", "nanotron", "model=llama_1b", "parallelism.pp=16", "cluster.nodes=2")
    text = plan.text(*words)
    assert "does not fit" not in text
    assert "but a pipeline stage has nothing to do: use a smaller parallelism.pp" in text
    assert plan.notes == ""


def test_the_ranks_that_zero_shards_over_are_named(plan: PlanCommand) -> None:
    words = ("model=llama3_8b", "parallelism=zero3", "cluster.nodes=2")
    assert "layout  dp 16, zero 3\n" in plan.text(*words)
    assert "layout  dp 16, zero 3 over 8 ranks\n" in plan.text(*words, "parallelism.shard_degree=8")


def test_a_table_is_written_beside_its_input(tmp_path: Path, plan: PlanCommand) -> None:
    source, target = write_table(tmp_path / "layouts.csv", row()), tmp_path / "predicted.csv"
    before = source.read_bytes()
    plan.refusal("--table", str(source), "--output", str(source))
    assert "never changed" in plan.notes
    assert plan.written("--table", str(source), "--output", str(target)) == ""
    assert source.read_bytes() == before
    with target.open(newline="") as stream:
        [written] = csv.DictReader(stream)
    assert float(written["pred_peak_memory_gib"]) > 0
    assert plan.written("--table", str(source)) == target.read_text()
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_nothing_is_written_for_a_bad_row(tmp_path: Path, plan: PlanCommand) -> None:
    source, target = write_table(tmp_path / "layouts.csv", row(), row(tp="x")), tmp_path / "predicted.csv"
    refusal = plan.refusal("--table", str(source), "--output", str(target))
    assert "line 3: tp=x: expected a whole number" in refusal
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["cluster=slurm", "cluster.gpus_per_node=8"], "cluster.hardware=auto: the planner needs the device"),
        (["--top", "0"], "--top belongs to --search"),
        (["--search", "--explain", "tp"], "give one of them"),
        (["--stall-s", "0"], "--stall-s belongs to --goodput"),
        (["--mix-seed", "0"], "--mix-seed belongs to --goodput"),
        (["--like", "x"], "--like belongs to --goodput"),
        (["--output", "x.csv"], "--output belongs to --table or --calibrate"),
        (["--framework", ""], "--framework is empty"),
        (["--table", ""], "--table: it is empty"),
        (["--table", "missing.csv"], "--table missing.csv: No such file"),
        (["--table", "missing.csv", "train.steps=5"], "leave out train.steps=5"),
        (["--table", "missing.csv", "--json"], "leave out --json"),
        (["--table", "."], "--table .: Is a directory"),
        (["--table", "missing.csv", "--output", ""], "--output: it is empty"),
        (["--table", "missing.csv", "--output", "."], "--output .: it is a folder"),
        (["--calibrate", "x", "--output", "x.csv"], "a profile's name ends in .json"),
        (["--calibrate", "x", "--output", "none/x.json"], "there is no folder none"),
        (["--calibrate", "x", "--framework", "megatron"], "leave out --framework megatron"),
        (["--calibrate", "x"], "there is no run in runs; give its path if it lies elsewhere\n"),
        (["--goodput", "--like", "x"], "there is no run in runs; give its path"),
        (["--goodput", "--like", ""], "--like is empty"),
        (["--goodput", "--stall-s", "-1"], "expected seconds, 0 or more"),
        (["--goodput", "cluster.mtbf_device_hours=0"], "cluster.mtbf_device_hours=0"),
        (["--goodput", "checkpoint.every_steps=often"], "use one, auto or null"),
        (["--explain", "parallelism.tpp", "model=llama3_8b"], "did you mean parallelism.tp?"),
        (["--exact", *MODEL, "--framework", "nanotron"], "there are none of nanotron here"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: PlanCommand
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in plan.refusal(*words)


def test_the_help_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch, plan: PlanCommand) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "  orchestra plan --table layouts.csv --output predicted.csv\n" in plan.text("--help")


@pytest.mark.slow
def test_both_counts_and_their_difference_are_shown(plan: PlanCommand) -> None:
    # So many words that the loss is the peak, and not what a norm of 256 numbers leaves uncounted.
    facts = plan.facts("--exact", *MODEL, "model.vocab_size=2048", "parallelism=zero3")
    for name in ("parameters", "gradients", "masters", "optimizer", "gathered", "peak"):
        component = facts[name]
        ratio = component["closed_form_bytes"] / component["counted_bytes"]
        assert component["difference"] == pytest.approx(ratio - 1, abs=1e-6)
        assert abs(component["difference"]) < 0.02


def test_the_comparison_fits_eighty_columns() -> None:
    compared = [Compared("later_steps", 3e13, 2 * 10**13), Compared("gathered", 3e9, 0)]
    lines = "\n".join(comparison_lines(compared, keeps_less=True)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("Blocks are counted as they run when they are not compiled")
    assert lines[:-2] == "\n".join(comparison_lines(compared)).splitlines()
