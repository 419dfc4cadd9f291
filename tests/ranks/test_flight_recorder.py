"""What a rank writes of its collectives when it is asked, by ranks that really wait in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Ranks

from orchestra.parallel.mesh import make_mesh
from orchestra.recovery.collectives import parsed, stalled_collectives
from orchestra.sizes.topology import Layout
from orchestra.train.watch import flight_recorder
from tests.support.waiting import eventually

pytestmark = pytest.mark.ranks


def waits(rank: int, world: int, folder: Path) -> str:
    """Record while rank 0 waits in a collective that rank 1 has not entered; return this rank's record."""
    mesh = make_mesh(rank, Layout(dp=world), torch.device("cpu"))
    values, was_asked = torch.ones(3, 5), folder / "asked"
    for _ in range(20):
        dist.all_reduce(values, group=mesh.dp_group)
    work = dist.all_reduce(values, group=mesh.dp_group, async_op=True) if rank == 0 else None
    assert rank == 0 or eventually(was_asked.exists, 60.0)

    def num_open() -> int:
        return sum(not entry.get("retired") for entry in flight_recorder.recorded()["entries"])

    # gloo wakes who waits before it notes that a collective is over.
    assert eventually(lambda: num_open() == (rank == 0), 60.0)
    record: dict[str, Any] = {"groups": flight_recorder._groups(mesh), **flight_recorder.recorded()}
    was_asked.touch()
    if work is None:
        dist.all_reduce(values, group=mesh.dp_group)
    else:
        work.wait()
    return json.dumps(record)


def test_the_rank_that_has_not_entered_a_collective_is_named(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2).run(waits, folder=tmp_path)
    (stall,) = stalled_collectives({rank: parsed(text.encode()) for rank, text in enumerate(texts)}, 2)
    ((rank, last),) = stall.missing
    assert (rank, stall.waiting, stall.collective.sequence) == (1, (0,), last + 1)
    assert stall.words() == (
        f"rank 1 has not entered all_reduce {last + 1} of group dp (2 ranks, fp32[3, 5]), the last one was "
        f"{last}; rank 0 waits there"
    )
    # The last ones of each group, however many there were.
    assert len(json.loads(texts[0])["entries"]) <= 10 * len(json.loads(texts[0])["groups"])
