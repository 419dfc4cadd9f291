"""Layouts that were drawn at random train what one process does, go on bit for bit, and restore elsewhere.

A few are by default; `make equivalence` takes three hundred (ORCHESTRA_EQUIVALENCE=all). A number that fails
is tried again by `pytest tests/ranks/test_drawn_layouts.py -k "[17]"` with that set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from drawn_layouts import Draw, draw, told
from mixture_trainings import Choices, trained_alone, trained_mixture
from pool import Ranks
from small_trainings import (
    GRAPHS,
    Trained,
    alone,
    distance,
    parameters,
    restore_and_go_on,
    save_and_go_on,
    trained,
)

from conf.schema import Config

IS_WHOLE = os.environ.get("ORCHESTRA_EQUIVALENCE") == "all"
# Experts; latents with tp and pp; a GPT whose blocks are compiled.
NUMBERS = range(300) if IS_WHOLE else (31, 39, 8)
STEPS = 3


def trained_as_drawn(rank: int, world: int, config: Config, choices: Choices | None) -> Trained:
    """Train some steps; of compiled blocks graphs are made, and no code."""
    torch.compiler.reset()
    with patch.object(torch, "compile", GRAPHS):
        if config.model.num_experts:
            return trained_mixture(rank, world, config, choices, STEPS)
        return trained(rank, world, config, STEPS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_layout_trains_what_one_process_does(ranks: Ranks, number: int) -> None:
    it = draw(number)
    expected: Any = trained_alone(it.alone, STEPS) if it.config.model.num_experts else alone(it.alone, STEPS)
    choices = getattr(expected, "choices", None)
    found = ranks(it.world).run(trained_as_drawn, config=it.config, choices=choices)
    name = f"{it.world} ranks, {told(it.config)}"
    assert all(of_rank.rows == found[0].rows for of_rank in found), name
    pairs = list(zip(found[0].rows, expected.rows, strict=True))
    # What rounding leads to grows from step to step, where AdamW divides a small number by its size.
    assert pairs[0][0][:2] == pytest.approx(pairs[0][1][:2], rel=1e-5), name
    for row, row_expected in pairs:
        assert row[0] == pytest.approx(row_expected[0], rel=1e-5), name
        assert row[1] == pytest.approx(row_expected[1], rel=1e-4), name
    assert distance(parameters(found), parameters([expected])) <= 1e-4, name


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_layout_goes_on_bit_for_bit_and_elsewhere(ranks: Ranks, tmp_path: Path, number: int) -> None:
    it: Draw = draw(number)
    name = f"{it.world} ranks, {told(it.kept)}; then {it.other_world}, {told(it.other)}"
    kept = ranks(it.world).run(save_and_go_on, config=it.kept, place=tmp_path, saved=2, last=STEPS)
    again = {"place": tmp_path, "last": STEPS}
    same = ranks(it.world).run(restore_and_go_on, config=it.kept, topic="same", **again)
    assert [(repr(rows), state) for rows, state, *_ in same] == [
        (repr(rows), state) for rows, state in kept
    ], name
    there = ranks(it.other_world).run(restore_and_go_on, config=it.other, topic="there", **again)
    digests = {digest for of_rank in (*same, *there) for digest in of_rank[2:]}
    assert len(digests) == 1, name
    losses, losses_there = ([row[0] for row in of_ranks[0][0]] for of_ranks in (kept, there))
    # In 16 bits, and where a choice of experts may turn over.
    assert losses_there == pytest.approx(losses, rel=0.02), name
