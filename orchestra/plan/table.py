"""Predicts every row of a CSV table of layouts, with columns as in the Ultra-Scale Playbook's benchmark.

Needed: num_hidden_layers hidden_size intermediate_size num_attention_heads vocab_size tied seq_len num_gpus
micro_batch_size grad_accum dp tp pp zero. May be there: gpu (h100), gpu_memory_gib (the device's),
num_key_value_heads (all heads), head_dim (hidden size ÷ heads), recompute (none), precision and
sequence_parallel (the framework's usual), cp (1), framework (nanotron), and of mixtures of experts
num_experts (0), num_experts_per_tok (2), moe_intermediate_size (intermediate_size),
shared_expert_intermediate_size (0) and ep (1). An empty cell means the value in brackets; all other columns
pass through. Rows are checked before the first is predicted, and nothing here writes a file.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TypeVar

from conf.schema import ModelConfig, PrecisionName, Recompute
from orchestra.errors import ConfigError
from orchestra.plan.assemble import network_of
from orchestra.plan.case import PlanCase
from orchestra.plan.devices import Accelerator, device
from orchestra.plan.frameworks import NANOTRON, framework, is_taken_for_another, published
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.space import is_possible
from orchestra.sizes import hardware
from orchestra.sizes.topology import Layout
from orchestra.sizes.units import GIB

NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "tied"),
    *("seq_len", "num_gpus", "micro_batch_size", "grad_accum", "dp", "tp", "pp", "zero"),
)
PREDICTED = ("pred_tokens_per_s_per_gpu", "pred_mfu_pct", "pred_peak_memory_gib", "pred_fits")

_DEVICES_PER_NODE = 8
# As far as NVLink reaches, and of that what jobs take whose ranks are powers of two: NVIDIA's recipes ask
# Slurm for segments of 16 nodes of 4, so that no rack's border cuts a group of neighbours.
_PER_NODE, _PER_SEGMENT = {"gb200": 72, "gb300": 72}, {"gb200": 64, "gb300": 64}
_LARGEST_ZERO = 3
# No size of a model, a batch or a cluster comes near it, and products of such numbers can be computed with.
_LARGEST_NUMBER = 10**12
_SMALL_A100_GIB = 40
# A table with a mistake in every row is told by its first ones.
_MAX_PROBLEMS = 20
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")

Row = Mapping[str, str]
Choice = TypeVar("Choice", bound=Enum)
cached_device: Callable[[str, PrecisionName, float | None], Accelerator] = cache(device)


@dataclass(frozen=True)
class LayoutTable:
    """A table as it was read: its columns in order, its rows as text, and the line each row ends on."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    lines: tuple[int, ...]


class _Cells:
    """Reads one row's cells and collects what is wrong with them."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.problems: list[str] = []

    def text(self, column: str, default: str = "") -> str:
        return self._row.get(column, "").strip() or default

    def number(self, column: str, *, least: int = 1, default: int | None = None) -> int:
        cell = self.text(column)
        if not cell and default is not None:
            return default
        try:
            value = float(cell)
            if value != int(value) or not least <= value <= _LARGEST_NUMBER:
                raise ValueError
        except (ValueError, OverflowError):
            self._wrong(column, cell, f"a whole number of at least {least}, at most 10¹²")
            return least or 1
        return int(value)

    def optional_number(self, column: str) -> int | None:
        return self.number(column) if self.text(column) else None

    def measure(self, column: str) -> float | None:
        cell = self.text(column)
        try:
            value = float(cell) if cell else None
            if value is not None and not 0 < value < float("inf"):
                raise ValueError
        except ValueError:
            self._wrong(column, cell, "a number above 0")
            return None
        return value

    def flag(self, column: str, default: bool | None = None) -> bool:
        cell = self.text(column).lower()
        if not cell and default is not None:
            return default
        if cell not in _YES + _NO:
            self._wrong(column, cell, "1 or 0")
        return cell in _YES

    def choice(self, column: str, kind: type[Choice], default: Choice) -> Choice:
        cell = self.text(column, str(default.value))
        try:
            return kind(cell.lower())
        except ValueError:
            self._wrong(column, cell, " or ".join(str(member.value) for member in kind))
            return default

    def _wrong(self, column: str, cell: str, expected: str) -> None:
        self.problems.append(f"{column}={cell or '(empty)'}: expected {expected}")


def read_table(file: Path) -> LayoutTable:
    """Read a table as text. Raises ConfigError when it is no CSV with the needed columns and full rows."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: expected a CSV file in UTF-8, found other bytes: {error.reason}"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    columns = tuple(name.strip() for name in next(reader, []))
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise ConfigError(f"{file}: line 1: the columns {', '.join(missing)} are missing; expected them all")
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"{file}: line 1: {', '.join(repeated)} stands there twice; expected each column once"
        )
    rows, lines, problems = [], [], []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(columns):
            problems.append(
                f"line {reader.line_num}: {len(cells)} cells; expected {len(columns)} as in line 1"
            )
        rows.append(dict(zip(columns, cells, strict=False)))
        lines.append(reader.line_num)
    _refuse(file, problems)
    return LayoutTable(columns, tuple(rows), tuple(lines))


def cases(file: Path, table: LayoutTable) -> list[PlanCase]:
    """Return the case of each row. Raises ConfigError naming lines, what was found and what was expected."""
    made, problems = [], []
    for row, line in zip(table.rows, table.lines, strict=True):
        case, wrong = case_of_row(row)
        problems += [f"line {line}: {problem}" for problem in wrong]
        if case is not None:
            made.append(case)
    _refuse(file, problems)
    return made


def _refuse(file: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = [f"{file}: {problem}" for problem in problems[:_MAX_PROBLEMS]]
        raise ConfigError([*shown, *([f"{file}: and {more} more like these"] if more > 0 else [])])


def case_of_row(row: Row) -> tuple[PlanCase | None, list[str]]:
    """Return the case that a row describes, or None and what is wrong with it."""
    cells = _Cells(row)
    model, mesh = _model(cells), _layout(cells)
    zero = cells.number("zero", least=0)
    if zero > _LARGEST_ZERO:
        cells.problems.append(f"zero={zero}: expected 0, 1, 2 or 3")
    memory_gib = cells.measure("gpu_memory_gib")
    name = _device_name(cells.text("gpu", "h100"), memory_gib)
    seq_len = cells.number("seq_len")
    profile = published(cells.text("framework", NANOTRON.name), name, seq_len)
    precision = cells.choice("precision", PrecisionName, profile.usual_precision)
    try:
        accelerator = cached_device(name, precision, memory_gib)
    except ConfigError as error:
        return None, [*cells.problems, str(error).replace("cluster.hardware=", "gpu=")]
    case = PlanCase(
        model=model,
        layout=mesh,
        seq_len=seq_len,
        micro_batch_size=cells.number("micro_batch_size"),
        accumulation=cells.number("grad_accum"),
        zero=zero,
        num_shards=mesh.dp * mesh.cp,
        sequence_parallel=cells.flag("sequence_parallel", profile.usual_sequence_parallel),
        recompute=cells.choice("recompute", Recompute, Recompute.none),
        precision=precision,
        device=accelerator,
        devices_per_node=_devices_per_node(accelerator.name, mesh.world_size),
        network=network_of(profile, accelerator.name),
        framework=profile,
    )
    return (None if cells.problems else case), cells.problems


def _devices_per_node(name: str, ranks: int) -> int:
    per_node = _PER_NODE.get(name, _DEVICES_PER_NODE)
    is_filled = ranks <= per_node or ranks % per_node == 0
    return per_node if is_filled else _PER_SEGMENT.get(name, per_node)


def taken_for(table: LayoutTable, all_cases: Sequence[PlanCase]) -> dict[str, str]:
    """Return for each trainer of a table whose rows another one's profile predicts that profile's name."""
    profiles = {}
    for row, case in zip(table.rows, all_cases, strict=True):
        name, used = row.get("framework", "").strip(), case.framework.name
        if name and (is_taken_for_another(name) or framework(name).name != used):
            profiles[name] = used
    return profiles


def _device_name(written: str, memory_gib: float | None) -> str:
    """Return a device's name as `orchestra.sizes.hardware` has it. Tables also say H100-SXM5-80GB, or A100
    beside its memory, which is 80 GB unless one of them says 40.
    """
    name = re.sub(r"[\s-]+", "_", written.lower()).removesuffix("gb")
    name = re.sub(r"^(nvidia|amd_instinct|amd)_", "", name)
    plain = re.sub(r"(_sxm\d?|_nvl72|_\d+)+$", "", name)
    if plain == "a100":
        is_small = name.endswith("_40") or (memory_gib is not None and memory_gib <= _SMALL_A100_GIB)
        plain = "a100_40" if is_small else "a100_80"
    known = (each for each in (written, name, plain) if hardware.row(each) is not hardware.UNKNOWN)
    return next(known, written)


def _model(cells: _Cells) -> ModelConfig:
    heads = cells.number("num_attention_heads")
    experts = cells.number("num_experts", least=0, default=0)
    model = ModelConfig(
        name=cells.text("model", "model"),
        hidden_size=cells.number("hidden_size"),
        intermediate_size=cells.number("intermediate_size"),
        num_hidden_layers=cells.number("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=cells.number("num_key_value_heads", default=heads),
        head_dim=cells.optional_number("head_dim"),
        vocab_size=cells.number("vocab_size"),
        tie_word_embeddings=cells.flag("tied"),
        num_experts=experts,
        num_experts_per_tok=cells.number("num_experts_per_tok", default=min(2, experts) or 2),
        moe_intermediate_size=cells.optional_number("moe_intermediate_size"),
        shared_expert_intermediate_size=cells.number("shared_expert_intermediate_size", least=0, default=0),
    )
    if not cells.problems and model.head_dim is None and model.hidden_size % heads:
        cells.problems.append(f"hidden_size={model.hidden_size}: expected a multiple of {heads} heads")
    if not cells.problems and heads % model.num_key_value_heads:
        key = f"num_key_value_heads={model.num_key_value_heads}"
        cells.problems.append(f"{key}: expected a divisor of {heads} heads")
    if not cells.problems and 0 < model.num_experts < model.num_experts_per_tok:
        key = f"num_experts_per_tok={model.num_experts_per_tok}"
        cells.problems.append(f"{key}: expected at most num_experts={model.num_experts}")
    return model


def _layout(cells: _Cells) -> Layout:
    mesh = Layout(
        dp=cells.number("dp"),
        tp=cells.number("tp"),
        pp=cells.number("pp"),
        cp=cells.number("cp", default=1),
        ep=cells.number("ep", default=1),
    )
    ranks = cells.number("num_gpus")
    if not cells.problems and mesh.world_size != ranks:
        product = f"dp·tp·pp·cp = {mesh.dp}·{mesh.tp}·{mesh.pp}·{mesh.cp} = {mesh.world_size}"
        cells.problems.append(f"num_gpus={ranks}: expected {product}")
    return mesh


def predicted_cells(prediction: Prediction) -> dict[str, str]:
    """Return a prediction as the table's own columns have it; MFU in PaLM's convention.

    A layout whose degrees do not divide what they split does not fit, whatever memory it takes.
    """
    fits = prediction.fits and is_possible(prediction.case)
    values = (
        f"{prediction.tokens_per_s_per_device:.2f}",
        "" if prediction.mfu is None else f"{100 * prediction.mfu:.3f}",
        f"{prediction.reported_peak.total / GIB:.3f}",
        str(int(fits)),
    )
    return dict(zip(PREDICTED, values, strict=True))


def with_predictions(table: LayoutTable, all_cases: Iterable[PlanCase]) -> str:
    """Return the table as CSV, each row as it was, with its prediction appended."""
    text = io.StringIO(newline="")
    columns = [name for name in table.columns if name not in PREDICTED]
    writer = csv.DictWriter(text, [*columns, *PREDICTED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, case in zip(table.rows, all_cases, strict=True):
        writer.writerow({**row, **predicted_cells(predict(case))})
    return text.getvalue()
