"""`benchmarks/gpu.py` on the CPU: everybody trains the same model, and the table and the JSON say what was
measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.gpu import SHAPES, parsed
from benchmarks.gpu_first_step import observed
from benchmarks.gpu_report import CONTESTANTS, Measured, rows_of, table
from conf.schema import RopeScaling
from orchestra.config.compose import compose

ROOT = Path(__file__).resolve().parents[3]


TINY = ("tiny", "--device", "cpu", "--precision", "fp32", "--steps", "1")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_tied"), [("tiny", False), ("tiny", True), ("tiny_moe", False)])
def test_every_contestant_trains_the_same_model(name: str, is_tied: bool) -> None:
    # It imports its neighbours by their own names, as the script does.
    from gpu_contestants import turn

    model = replace(SHAPES[name].model, tie_word_embeddings=is_tied, rope_scaling=RopeScaling(is_tied))
    shape = replace(SHAPES[name], model=model)
    trains_here = [each for each in CONTESTANTS if not each.startswith("fp8")]
    names = [each for each in trains_here if each not in ("limit", "sustained", "torchtitan")]
    if name == "tiny" and not is_tied and find_spec("torchtitan"):
        names.append("torchtitan")
    # Compiling is for the GPU, and takes a minute here.
    with torch.compiler.set_stance("force_eager"):
        turns = {each: turn(each, parsed([*TINY]), shape, torch.device("cpu")) for each in names}
    losses = [found["first_loss"] for found in turns.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert 5 < losses[0] < 6


@pytest.mark.parametrize(
    ("name", "is_tied", "reason"), [("tiny", True, "tied embeddings"), ("tiny_moe", False, "experts")]
)
def test_torchtitan_is_left_out_of_what_it_has_no_model_for(name: str, is_tied: bool, reason: str) -> None:
    from gpu_contestants import LeftOutError, turn

    shape = replace(SHAPES[name], model=replace(SHAPES[name].model, tie_word_embeddings=is_tied))
    with pytest.raises(LeftOutError, match=f"torchtitan's Llama 3 has not: {reason}"):
        turn("torchtitan", parsed([*TINY]), shape, torch.device("cpu"))


@pytest.mark.slow
def test_the_command_takes_turns_and_writes_what_it_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    words = (*TINY, "--rounds", "2", "--only", "eager", "fp8", "sustained", "limit", "--output", str(output))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "sustained", "limit"]
    assert "compute capability 8.9" in found["left_out"]["fp8"]
    assert (found["rounds"], found["shape"]) == (2, "tiny")
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 32 / row["median_s"])
        assert row["contestant"] in done.stdout
    assert (rows["limit"]["of_limit"], rows["eager"]["of_best_peer"]) == (1, None)
    assert rows["eager"]["first_steps"] == [{}, {}]
    assert f"left out: {CONTESTANTS['fp8']}" in done.stdout
    assert "without a peer" in done.stdout


def test_what_a_first_step_compiles_and_tries_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU no kernel is tried: one that would be stands in its place."""
    asked = []

    def tried(_: object, *arguments: object) -> dict[str, float]:
        asked.append(arguments)
        return {"one": 1.0, "other": 2.0}

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", tried)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("waited"))
    kernel = SimpleNamespace(
        inductor_meta={"kernel_name": "triton_poi"}, autotune_cache_info={"state": "miss"}
    )
    with observed() as first_step:
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
        assert CachingAutotuner.benchmark_all_configs(kernel, "x") == {"one": 1.0, "other": 2.0}
    torch.compiler.reset()
    assert CachingAutotuner.benchmark_all_configs is tried
    assert asked == ["waited", ("x",)]
    assert 0 < first_step["trace_s"] <= first_step["compile_s"]
    (seen,) = first_step["tried"]
    assert (seen["kernel"], seen["configs"], "miss" in seen["cache"]) == ("triton_poi", 2, True)
    assert min(seen["waited_s"], seen["tried_s"]) >= 0


def test_what_takes_long_and_is_no_aim_of_every_shape_runs_where_it_is_named() -> None:
    assert {*CONTESTANTS} - {*parsed(["8b8"]).only} == {"fp8_rows", "offload"}
    assert parsed(["gpt2_xl", "--only", "full", "offload"]).only == ["full", "offload"]


@pytest.mark.parametrize("name", ["llama_1b", "llama_125m", "gpt2_xl"])
def test_shapes_are_the_presets_of_their_names(name: str) -> None:
    assert SHAPES[name].model == compose([f"model={name}", "cluster.device=cpu"]).config.model


def measured(*seconds: float) -> Measured:
    found = Measured()
    for each in seconds:
        turn = {"seconds": each, "first_step_s": 9.0, "peak_bytes": 2**30, "first_loss": 5.0, "facts": {}}
        found.add(turn)
    return found


def test_ratios_are_medians_over_rounds_against_the_best_peer_and_the_limit() -> None:
    # The machine is twice as slow in the last round, which ended before the limit's turn.
    found = {
        "compiled": measured(1.0, 1.0, 2.0),
        "transformers": measured(1.5, 1.5, 3.0),
        "fully_shard": measured(2.0, 2.0, 4.0),
        "limit": measured(0.5, 0.5),
    }
    rows = {row["name"]: row for row in rows_of(found, tokens=100, flops_per_token=10, peak_flops=4000.0)}
    assert [row["name"] for row in rows.values() if row["is_best_peer"]] == ["transformers"]
    assert (rows["compiled"]["of_best_peer"], rows["compiled"]["of_limit"]) == (1.5, 0.5)
    assert (rows["transformers"]["of_best_peer"], rows["fully_shard"]["of_best_peer"]) == (1.0, 0.75)
    assert (rows["compiled"]["tokens_per_s"], rows["compiled"]["mfu"]) == (100.0, 0.25)
    lines = table(list(rows.values()))
    assert lines[2].startswith("transformers, autocast, compiled    *")
    assert len({len(line) for line in lines[:-1]}) == 1


def test_without_peer_limit_and_peak_the_table_says_so() -> None:
    rows = rows_of({"eager": measured(1.0)}, tokens=100, flops_per_token=10, peak_flops=None)
    assert table(rows)[1].count("n/a") == 3
