"""What `make test` runs where processors are idle."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = SourceFileLoader("lanes", str(ROOT / ".ci" / "lanes"))
    spec = spec_from_loader("lanes", loader)
    assert spec is not None
    module = module_from_spec(spec)
    # Dataclasses look for their module.
    monkeypatch.setitem(sys.modules, "lanes", module)
    loader.exec_module(module)
    return module


def test_there_is_no_idle_lane_where_processes_may_not_be_idle(
    lanes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose system calls are filtered: every part of the lane would fail at once."""
    if not lanes.has_idle_lane():
        pytest.skip("needs root who may run processes idle (chrt)")
    refused = tmp_path / "chrt"
    refused.write_text("#!/bin/sh\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not lanes.has_idle_lane()


def test_what_runs_idle_counts_least_where_the_kernel_weighs_sessions_too(
    lanes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own policy orders a process among those of its session alone there: many kernels' default."""
    weight = Path("/proc/self/autogroup")
    if not lanes.has_idle_lane() or not weight.exists():
        pytest.skip("needs root who may run processes idle (chrt), and a kernel that can weigh sessions")
    waited = (
        "import os, time, pathlib\n"
        "weight, end = pathlib.Path('/proc/self/autogroup'), time.monotonic() + 50\n"
        "while 'nice 19' not in weight.read_text() and time.monotonic() < end: time.sleep(0.01)\n"
        "print(weight.read_text().split()[-1], os.sched_getscheduler(0) == os.SCHED_IDLE)\n"
    )
    lane = lanes.Lanes([lanes.Part("waits", (sys.executable, "-c", waited), when_idle=())])
    before = weight.read_text()
    lane._lane(is_idle=True)
    assert "19 True" in capsys.readouterr().out
    assert weight.read_text() == before, "others count what they counted"


def test_each_test_runs_in_one_part(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is an idle lane or not."""
    monkeypatch.chdir(ROOT)
    files = sorted(str(file) for file in lanes.TESTS.rglob("test_*.py"))
    assert files
    for has_idle_lane in (True, False):
        monkeypatch.setattr(lanes, "has_idle_lane", lambda answer=has_idle_lane: answer)
        waiting = lanes.waiting_parts((), is_fast=False, is_linted=True)
        assert any(part.when_idle == () for part in waiting), "lint may be idle"
        assert sorted(file for part in waiting for file in run_by(part)) == files


def run_by(part: Any) -> Iterator[str]:
    """Yield the files of tests that a part's pytest collects."""
    words = [word for word in part.words if word.startswith(("tests", "--ignore="))]
    ignored = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    for name in words:
        path = Path(name)
        files = path.rglob("test_*.py") if path.is_dir() else [path] if path.is_file() else []
        yield from (str(file) for file in files if not ignored & {str(file), *map(str, file.parents)})


@pytest.mark.timeout(100)
def test_where_tests_are_patient_the_limit_of_a_test_does_not_count(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the idle lane, whose tests wait for a processor. A mark is stronger than --timeout."""
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    monkeypatch.setattr(request.config.option, "patient", True)
    conftest.pytest_collection_modifyitems(request.config, [request.node])
    assert request.node.get_closest_marker("timeout").args == (conftest.PATIENCE_S,)


def test_further_examples_are_left_out_by_name_and_a_name_of_none_is_an_error(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    left_out = tmp_path / "names.txt"
    monkeypatch.setattr(conftest, "LEFT_OUT", left_out)
    collected = {"tests/a.py::one", "tests/a.py::two[x]", "tests/a.py::two[y]", "tests/a.py::three[x]"}
    left_out.write_text("# why\n\ntests/a.py::three[x]\ntests/a.py::two\ntests/elsewhere.py::one\n")
    assert conftest.further_examples(collected) == collected - {"tests/a.py::one"}
    left_out.write_text("tests/a.py::two[z]\n")
    with pytest.raises(pytest.UsageError, match=r"there is no tests/a\.py::two"):
        conftest.further_examples(collected)


def test_only_make_test_leaves_further_examples_out(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(lanes, "waiting_parts", lambda pytest, **_: given.append(tuple(pytest)) or [])
    monkeypatch.setattr(lanes.subprocess, "run", lambda *_, **__: None)
    for words in ([], ["--all"], ["--fast"]):
        lanes.main("python", words)
    assert ["--without-further" in words for words in given] == [True, False, False]
