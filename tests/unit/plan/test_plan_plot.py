"""`orchestra plan --plot`: the picture shows the numbers that are printed, and wrong wishes write nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from orchestra.cli import main

PIPELINE = ["plan", "model=llama3_8b", "parallelism.pp=4", "precision=bf16"]


def words_of(picture: str) -> set[str]:
    """Return the words of an SVG picture, which matplotlib keeps as comments beside their outlines."""
    return {word.strip() for word in re.findall(r"<!-- (.*?) -->", picture)}


def test_every_stage_and_component_is_in_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.svg"
    assert main([*PIPELINE, "--plot", str(target)]) == 0
    assert main(PIPELINE) == 0
    printed = capsys.readouterr().out
    ElementTree.parse(target)
    words = words_of(target.read_text())
    assert {f"stage {number}" for number in (1, 2, 3, 4)} <= words
    components = {"parameters", "gradients", "master weights", "optimizer state", "activations"}
    assert all(component in printed for component in components)
    assert components <= words
    assert any("llama3_8b on 8 × h100" in word for word in words)


def test_a_page_holds_picture_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.html"
    assert main([*PIPELINE, "--plot", str(target)]) == 0
    assert main(PIPELINE) == 0
    page = target.read_text()
    assert "<svg" in page
    assert next(line for line in capsys.readouterr().out.splitlines() if line.startswith("speed")) in page
    # It is whole by itself: nothing is fetched.
    assert not re.search(r'(src|href)="(?!#)', page)


def test_a_bitmap_is_written(tmp_path: Path) -> None:
    target = tmp_path / "plan.png"
    assert main(["plan", "model=debug", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("plan.gif", [], "use .png, .svg"),
        ("plan", [], "no ending"),
        ("none/plan.png", [], "there is no folder"),
        ("plan.png", ["--json"], "ask for one of them"),
        ("plan.png", ["--search"], "different things"),
    ],
)
def test_wrong_wishes_write_nothing(
    name: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model=debug", "--plot", str(tmp_path / name), *more]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_picture_and_nothing_is_predicted_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.png").mkdir()
    assert main(["plan", "model=none", "--plot", str(tmp_path / "plan.png")]) == 2
    assert "plan.png: it is a folder" in capsys.readouterr().err
