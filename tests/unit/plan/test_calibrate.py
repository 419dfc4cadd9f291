"""Calibration: runs that a known machine would have written lead back to what it predicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import PlanCommand

from orchestra.cli.plan.file_modes import profile_lines
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.calibrate import (
    calibrated,
    fitted,
    measured_run,
    prediction_of,
    solved,
    starting_cpu_profile,
)
from orchestra.plan.predict import predict
from orchestra.plan.profiles import Profile
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir
from orchestra.sizes.flops import model_flops_per_token

CORES, MEMORY = 4, 32e9
USUAL = starting_cpu_profile({"fp32": 1e11}, {"product_flops.fp32": 8e10}, CORES, MEMORY)
# Another machine than calibration starts from: each constant is half or twice the usual one.
TRUE = replace(
    USUAL,
    constants=USUAL.constants
    | {"product_flops.fp32": 5e10, "memory_bytes_per_s": 4e9, "link_bytes_per_s": 4e8, "fixed_bytes": 6e8},
)
SMALL = "model.hidden_size=256 model.num_hidden_layers=4 model.vocab_size=4096 train.seq_len=256"
LARGE = "model.hidden_size=512 model.num_hidden_layers=8 model.vocab_size=8192 train.seq_len=256"
FIT = {
    "small": f"{SMALL} cluster.gpus_per_node=1",
    "large": f"{LARGE} cluster.gpus_per_node=1",
    "two": f"{LARGE} cluster.gpus_per_node=2",
    "cut": f"{SMALL} cluster.gpus_per_node=2 parallelism=tp2",
}
HELD_OUT = {
    "four": f"{LARGE} cluster.gpus_per_node=4 parallelism=zero3",
    "eight": f"{SMALL} cluster.gpus_per_node=8 parallelism=zero1",
}


def written(folder: Path, name: str, overrides: str, *, steps: int = 6, machine: Profile = TRUE) -> RunDir:
    """Write the run that the machine would have made: two slow steps, then the predicted ones."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    config = compose(["cluster.device=cpu", *overrides.split()], Situation("plan")).config
    write_config(run.config, config)
    (run.path / "run.json").write_text(json.dumps({"name": name}))
    found = predict(case_of(config, profile=machine))
    per_device = found.tokens_per_s_per_device
    row = {
        "tokens_per_s_per_device": per_device,
        "mfu": model_flops_per_token(config.model, 256) * per_device / found.case.device.peak_flops,
        "memory_peak_bytes": round(found.peak.total),
    }
    times = [5.0, 3.0, *[found.time.total] * (steps - 2)][:steps]
    rows = [{"step": step, "step_time_s": seconds, **row} for step, seconds in enumerate(times, 1)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return run


def test_a_fit_finds_the_machine_that_the_runs_came_from(tmp_path: Path) -> None:
    runs = [measured_run(written(tmp_path, name, overrides)) for name, overrides in FIT.items()]
    profile = calibrated(runs, CORES, MEMORY)
    assert profile.peak_flops["fp32"] == pytest.approx(1e11)
    for residual in profile.residuals:
        assert residual.predicted_step_s == pytest.approx(residual.step_s, rel=0.03)
        assert residual.predicted_peak_bytes == pytest.approx(residual.peak_bytes, rel=0.01)
    for name, overrides in HELD_OUT.items():
        run = measured_run(written(tmp_path, name, overrides))
        found = prediction_of(run, profile)
        assert found.time.total == pytest.approx(run.step_s, rel=0.10)
        assert found.peak.total == pytest.approx(run.peak_bytes, rel=0.03)


def test_what_no_run_decides_is_told_and_stays(tmp_path: Path) -> None:
    runs = [measured_run(written(tmp_path, name, FIT[name])) for name in ("small", "large")]
    profile = calibrated(runs, CORES, MEMORY)
    assert {"link_bytes_per_s", "inside_latency_s"} <= set(profile.undecided)
    assert profile.constants["link_bytes_per_s"] == pytest.approx(USUAL.constants["link_bytes_per_s"])


def test_a_run_of_two_steps_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run small: 2 rows of metrics; expected more than 2"):
        measured_run(written(tmp_path, "small", FIT["small"], steps=2))


def test_calibrating_prints_residuals_and_writes_a_profile_to_plan_with(
    tmp_path: Path, plan: PlanCommand
) -> None:
    runs = [str(written(tmp_path, name, overrides).path) for name, overrides in FIT.items()]
    printed = plan.text("--calibrate", *runs, "--output", str(tmp_path / "here.json"))
    assert "products in fp32" in printed
    assert all(name in printed for name in FIT)
    sizes = ["cluster.gpus_per_node=2", "model.hidden_size=256"]
    assert plan.facts(f"cluster.hardware={tmp_path}/here.json", *sizes)["device"] == "cpu"
    plan.refusal("--calibrate", str(tmp_path / "nothing"))


def test_a_member_of_a_sweep_is_called_by_its_sweep(tmp_path: Path, plan: PlanCommand) -> None:
    for sweep in ("grid", "wide"):
        run = written(tmp_path / sweep, "000", FIT["small"])
        run.record.write_text(json.dumps({"name": "000", "sweep": sweep}))
    printed = plan.text("--calibrate", str(tmp_path / "grid/000"), str(tmp_path / "wide/000"))
    assert "fitted on 2 runs: grid/000, wide/000" in printed
    assert all(f"\n{name} " in printed for name in ("grid/000", "wide/000"))


def test_calibrating_fits_eighty_columns_with_long_names(tmp_path: Path) -> None:
    name = "a-run-whose-name-says-all-that-it-was-for"
    profile = calibrated([measured_run(written(tmp_path, name, FIT["small"]))], CORES, MEMORY)
    constants = profile.constants | {"product_flops.bf16_fp32_grad": 1.234e9}
    peak_flops = {"bf16_fp32_grad": 1.234e9}
    lines = profile_lines(
        replace(profile, constants=constants, peak_flops=peak_flops, undecided=[*constants])
    )
    assert max(map(len, lines)) <= 80
    assert name in lines


def test_a_fit_of_a_power_law_finds_both_constants() -> None:
    # Its first pivot is zero.
    assert solved([[0.0, 2.0], [1.0, 1.0]], [4.0, 5.0]) == pytest.approx([3.0, 2.0])
    points = [(1.0, 3.0), (2.0, 12.0), (4.0, 48.0)]

    def residuals(constants: dict[str, float]) -> list[float]:
        return [math.log(constants["a"] * x ** constants["b"] / y) for x, y in points]

    found = fitted(residuals, {"a": 1.0, "b": 1.0}, 0.1, {"a": 1e-6, "b": 1e-6})
    assert found == pytest.approx({"a": 3, "b": 2}, rel=1e-3)
