"""train.compile=auto on a rank: settled before anything is built, and told where it cannot be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import Config, ParallelismConfig, TrainConfig
from orchestra.errors import ConfigError
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.files import JsonLinesReader
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import Layout
from orchestra.train import build
from orchestra.train.build import with_compilation

AUTO = Config()


def rank_alone(device: str) -> Mesh:
    """Return the mesh of one rank. No tensor is made on its device."""
    return make_mesh(0, Layout(dp=1), torch.device(device))


def settled(folder: Path, config: Config, mesh: Mesh) -> tuple[bool | str, list[str]]:
    """Return what a rank takes train.compile for, and the causes that it records."""
    run = RunDir(folder)
    events = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    chosen = with_compilation(config, mesh, events).train.compile
    written = JsonLinesReader(run.event_file(rank_writer(0, 0))).read_new()
    return chosen, [str(event["cause"]) for event in written if event["event"] == "compile_off"]


@pytest.mark.parametrize(("chosen", "expected"), [("auto", False), (False, False), (True, True)])
def test_on_the_cpu_auto_is_eager_and_nothing_is_said(
    tmp_path: Path, chosen: bool | str, expected: bool
) -> None:
    config = Config(train=TrainConfig(compile=chosen))
    assert settled(tmp_path, config, rank_alone("cpu")) == (expected, [])


def test_auto_without_a_compiler_trains_eager_on_a_gpu_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    chosen, (cause,) = settled(tmp_path, AUTO, rank_alone("cuda"))
    assert chosen is False
    assert cause.startswith("a C compiler")
    assert "install gcc or clang" in cause
    assert capfd.readouterr().err.count(cause) == 1


@pytest.mark.parametrize(
    ("tp", "backend", "expected"), [(2, "gloo", False), (1, "gloo", True), (2, "nccl", True)]
)
def test_auto_is_eager_on_gpus_whose_tensor_parallelism_gloo_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, backend: str, expected: bool
) -> None:
    monkeypatch.setattr(build, "_lacking_on_any_rank", lambda *_: ())
    alone = make_mesh(0, Layout(dp=1), torch.device("cuda"))
    mesh = replace(alone, layout=Layout(dp=2 // tp, tp=tp), backend=backend)
    config = replace(AUTO, parallelism=ParallelismConfig(tp=tp))
    chosen, causes = settled(tmp_path, config, mesh)
    assert chosen is expected
    assert [f"parallelism.tp={tp}" in cause for cause in causes] == [True] * (not expected)


def test_true_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    wanted = replace(AUTO, train=replace(AUTO.train, compile=True))
    with pytest.raises(ConfigError, match=r"train.compile=true: a C\+\+ compiler not found \(install g\+\+"):
        settled(tmp_path, wanted, rank_alone("cpu"))
