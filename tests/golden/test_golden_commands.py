"""What commands print that start nothing is what was recorded: moving code alters none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_output import PARTS
from goldens import RECORDED, REMEDY, Forked, differences, normalised, read, settled


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Let the commands that are compared with those recorded from real ones start soon."""
    with Forked():
        yield


# Each part runs up to forty commands, one after the other.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", PARTS)
def test_commands_print_what_was_recorded(part: str, tmp_path: Path) -> None:
    make, patterns = PARTS[part]
    found = make(tmp_path)
    names = {str(file.relative_to(RECORDED)) for pattern in patterns for file in RECORDED.glob(pattern)}
    assert names == set(found), REMEDY
    wrong = [line for name in sorted(names) for line in differences(read(name), found[name], name)]
    assert not wrong, "\n".join([*wrong, REMEDY])


def test_a_key_that_is_gone_and_a_number_that_moved_are_differences() -> None:
    recorded = {"a": [1, {"b": 0.1}], "c": "text"}
    assert differences(recorded, {"a": [1, {"b": 0.1 + 1e-12}], "c": "text"}) == []
    assert differences(recorded, {"a": [1, {"b": 0.1001}]}) == [
        ".a[1].b: recorded 0.1, found 0.1001",
        ".c: recorded 'text', found '<absent>'",
    ]
    assert differences(recorded, {"a": [1], "c": "text", "d": 1})


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ("python -m orchestra.crew /runs/a", "python -m <module> /runs/a"),
        ("see launchers/slurm/script.py:12", "see <file>"),
        ("checkpointing.dir", "<module>"),
        ("checkpoint.dir=x and orchestra status", "checkpoint.dir=x and orchestra status"),
    ],
)
def test_names_of_modules_are_left_out(printed: str, kept: str, tmp_path: Path) -> None:
    assert normalised(printed, tmp_path) == kept


def test_words_of_sentences_are_left_out_but_not_that_they_are_there() -> None:
    said = {"reason": "it was asked to", "age_s": 3.0, "message": "", "code": 75}
    assert settled(said) == {"reason": "<sentence>", "age_s": "<age>", "message": "", "code": 75}
