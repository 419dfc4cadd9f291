"""RUN as users type it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestra.cli.text.resolve import all_targets, resolve
from orchestra.errors import ConfigError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    parent = tmp_path / "runs"
    for name in ("debug-1", "debug-12", "llama-a"):
        (parent / name).mkdir(parents=True)
        (parent / name / "run.json").write_text("{}")
    (parent / "notes").mkdir()
    (parent / ".debug-3.draft").mkdir()
    (parent / ".debug-3.draft" / "run.json").write_text("{}")
    return parent


def test_a_name_a_unique_start_and_a_path_all_work(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    wanted = runs / "llama-a"
    for text in ("llama-a", "ll", "runs/llama-a", str(wanted)):
        assert resolve(text, Path("runs")).path == wanted


def test_an_exact_name_wins_over_longer_ones(runs: Path) -> None:
    assert resolve("debug-1", runs).name == "debug-1"


def test_an_ambiguous_start_lists_the_candidates(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 runs start so: .*debug-1.*type more"):
        resolve("debug", runs)


def test_a_wrong_name_gets_the_nearest(runs: Path) -> None:
    with pytest.raises(ConfigError, match="nearest are llama-a"):
        resolve("lama-a", runs)


def test_directories_that_are_no_runs_are_refused_and_not_listed(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither run\.json"):
        resolve(str(runs / "notes"), runs)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve("./nothing", runs)
    assert {run.name for run in all_targets(runs)} == {"debug-1", "debug-12", "llama-a"}


def test_no_runs_at_all(tmp_path: Path) -> None:
    assert all_targets(tmp_path / "runs") == []
    with pytest.raises(ConfigError, match="--dir"):
        resolve("x", tmp_path / "runs")
    with pytest.raises(ConfigError, match="give its path if it lies elsewhere"):
        resolve("x", tmp_path / "runs", takes_dir=False)
