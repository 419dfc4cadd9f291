"""Cases for the planner's tests, and the row of a table that describes one."""

from __future__ import annotations

from conf.schema import ModelConfig
from orchestra.plan.case import PlanCase
from orchestra.plan.table import case_of_row

LLAMA_8B = ModelConfig(
    name="llama3_8b",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


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
    found, problems = case_of_row(row(**changes))
    assert found is not None, problems
    return found
