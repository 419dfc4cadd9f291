"""Cases for the planner's tests, the tables that describe them, and the command as it is typed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from support.command_line import CommandLine

from orchestra.cli.plan import configuration
from orchestra.errors import EXIT_USAGE
from orchestra.plan.case import PlanCase
from orchestra.plan.table import case_of_row

LLAMA_8B = configuration(["model=llama3_8b"]).model


def row(**changes: object) -> dict[str, str]:
    """Return a row of 8 GPUs training an 8B model by plain data parallelism, with changes."""
    usual: dict[str, object] = {
        "model": "8B",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "tied": 0,
        "seq_len": 4096,
        "num_gpus": 8,
        "micro_batch_size": 1,
        "grad_accum": 16,
        "dp": 8,
        "tp": 1,
        "pp": 1,
        "zero": 0,
        "framework": "orchestra",
    }
    return {name: str(value) for name, value in {**usual, **changes}.items()}


def case(**changes: object) -> PlanCase:
    """Return the case of such a row."""
    made, problems = case_of_row(row(**changes))
    assert made is not None, problems
    return made


def write_table(file: Path, *rows: dict[str, str]) -> Path:
    """Write rows as CSV under the columns of the first one."""
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


class PlanCommand:
    """Runs the command and returns what it prints; `notes` has the last call's standard error."""

    def __init__(self, orchestra: CommandLine) -> None:
        self._orchestra = orchestra
        self.notes = ""

    def written(self, *words: str, code: int = 0) -> str:
        """Return the output as it is: a table."""
        text, self.notes = self._orchestra("plan", *words, code=code)
        return str(text)

    def text(self, *words: str, code: int = 0) -> str:
        """Return the output, whose lines have at most 80 columns and no blanks at their ends."""
        text = self.written(*words, code=code)
        assert max(map(len, text.splitlines())) <= 80
        assert all(line == line.rstrip() for line in text.splitlines())
        return text

    def facts(self, *words: str, code: int = 0) -> Any:
        """Return what --json prints."""
        return self._orchestra.json("plan", *words, code=code)

    def refusal(self, *words: str) -> str:
        """Return why the command is refused."""
        self.written(*words, code=EXIT_USAGE)
        return self.notes
