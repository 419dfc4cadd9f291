"""`orchestra plan` as it is typed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan_cases import row

from orchestra.cli import main
from orchestra.errors import EXIT_USAGE


def table(tmp_path: Path, *rows: dict[str, str]) -> Path:
    file = tmp_path / "layouts.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_a_prediction_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["model=llama3_8b", "parallelism=tp8_pp4", "cluster.nodes=16", "train.micro_batch_size=1"]
    assert main(["plan", *layout, "precision=bf16", "train.global_batch_size=512"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())
    for word in ("optimizer state", "pipeline bubble", "MFU", "HFU", "GPU-hours", "fits"):
        assert word in text


def test_json_has_bytes_seconds_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama_1b", "precision=bf16", "train.steps=1000", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == 1_235_814_400
    assert facts["stages"][0]["parameters_bytes"] == 2 * facts["num_parameters"]
    assert sum(facts["step_time_parts_s"].values()) == pytest.approx(facts["step_time_s"])
    assert facts["gpu_hours"] == pytest.approx(8 * facts["run_s"] / 3600)
    assert 0 < facts["mfu"] < 1


@pytest.mark.parametrize("experiment", ["llama3_70b", "llama3_8b", "llama_1b", "llama_125m"])
def test_shipped_experiments_can_be_planned_without_their_data(
    experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["cluster.hardware=h100", "cluster.gpus_per_node=8", "cluster.device=cuda"]
    assert main(["plan", f"experiment={experiment}", *sizes]) == 0
    assert "tokens/s per device" in capsys.readouterr().out


def test_a_device_without_figures_is_told_with_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster=slurm", "cluster.gpus_per_node=8"]) == EXIT_USAGE
    assert "cluster.hardware=auto: the planner needs the device's name" in capsys.readouterr().err


def test_a_table_is_written_beside_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = table(tmp_path, row()), tmp_path / "predicted.csv"
    before = source.read_bytes()
    assert main(["plan", "--table", str(source), "--output", str(target)]) == 0
    assert source.read_bytes() == before
    with target.open(newline="") as stream:
        [written] = csv.DictReader(stream)
    assert float(written["pred_peak_memory_gib"]) > 0
    assert main(["plan", "--table", str(source)]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_nothing_is_written_for_a_bad_row_or_over_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = table(tmp_path, row(), row(tp="x")), tmp_path / "predicted.csv"
    assert main(["plan", "--table", str(source), "--output", str(target)]) == EXIT_USAGE
    assert "line 3: tp=x: expected a whole number" in capsys.readouterr().err
    assert not target.exists()
    assert main(["plan", "--table", str(source), "--output", str(source)]) == EXIT_USAGE
    assert "never changed" in capsys.readouterr().err


def test_options_that_do_not_belong_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--table", str(table(tmp_path, row())), "train.steps=5"]) == EXIT_USAGE
    assert "leave out train.steps=5" in capsys.readouterr().err
    assert main(["plan", "--output", "x.csv"]) == EXIT_USAGE


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--top", "0"], "--top belongs to --search"),
        (["--stall-s", "0"], "--stall-s belongs to --goodput"),
        (["--mix-seed", "0"], "--mix-seed belongs to --goodput"),
        (["--output", "x.csv"], "--output belongs to --table or --calibrate"),
        (["--framework", ""], "--framework is empty"),
        (["--table", ""], "--table: it is empty"),
        (["--table", "missing.csv"], "--table missing.csv: No such file"),
        (["--table", "."], "--table .: Is a directory"),
        (["--table", "missing.csv", "--output", ""], "--output: it is empty"),
        (
            ["--table", "missing.csv", "--output", "none/o.csv"],
            "--output none/o.csv: there is no folder none",
        ),
        (["--table", "missing.csv", "--output", "."], "--output .: it is a folder"),
    ],
)
def test_wrong_options_are_told_before_anything_is_read(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_the_help_fits_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "  orchestra plan --table layouts.csv --output predicted.csv" in text.splitlines()


def test_planning_loads_no_torch() -> None:
    code = "import sys; from orchestra.cli import main; main(['plan']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not any(f"'{name}'" in loaded for name in ("torch", "scipy", "pandas", "matplotlib", "wandb"))
