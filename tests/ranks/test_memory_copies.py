"""Copies in memory: a node is lost, another one fetches what it held, and the run goes on bit for bit.

Each node is a folder of its own; the copies travel by real TCP on the loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attempts import EVERY, STEPS, attempt_of, config_of, events_of, kill_all, restored, rows
from pool import RankPool, Ranks

from checkpointing.integrity import checksums
from conf.schema import ExpertPlacement, StateDType
from launchers.memory_store.exchange import CopyPusher, CopyServer, bring_copies
from launchers.memory_store.store import OWN, CopyStore, open_copy_store
from orchestra.data.order import read_ledger
from orchestra.recovery.copies import FromMemory, NextNodes, held_copies, plan
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import read_lineage
from tests.support.waiting import eventually

# Two updates come after the last copy: had one of them not waited for it, it would hold other values.
COPY_EVERY, COPIED, KILL_AT = 3, 6, 9
SECRET = "of the test"


class Node:
    """A node's agent, as far as copies go."""

    def __init__(self, place: Path, number: int) -> None:
        self.store: CopyStore = open_copy_store("run", f"node{number}", place)
        self.server = CopyServer(self.store, "127.0.0.1", SECRET)
        self.pusher: CopyPusher | None = None

    def push(self, ranks: range, attempt: int, neighbour: Node) -> None:
        neighbour.server.expect(attempt)
        self.pusher = CopyPusher(self.store, ranks, attempt, neighbour.server.address, SECRET)

    def stop(self) -> None:
        if self.pusher is not None:
            self.pusher.close()
        self.server.close()

    def lose(self) -> None:
        self.stop()
        self.store.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Return two nodes and a spare."""
    (tmp_path / "memory").mkdir()
    found = [Node(tmp_path / "memory", number) for number in range(3)]
    yield found
    for node in found:
        node.lose()


def trained_until_lost(pool: RankPool, nodes: list[Node], path: Path, **settings: Any) -> None:
    """Train the first attempt on two nodes until it is interrupted; all that was copied has been sent."""
    per_node = pool.size // 2
    for number in (0, 1):
        nodes[number].push(range(number * per_node, (number + 1) * per_node), 0, nodes[1 - number])
    config = config_of(copy_every=COPY_EVERY, inject=kill_all(KILL_AT), **settings)
    folders = [node.store.folder for node in nodes[:2]]
    assert pool.run(attempt_of, path=path, attempt=0, config=config, folders=folders) == [None] * pool.size
    pushers = [node.pusher for node in nodes[:2] if node.pusher is not None]
    assert eventually(lambda: all(pusher.pushed_step == COPIED for pusher in pushers), 20)


def gone_on(
    pool: RankPool, path: Path, folders: Sequence[Path], attempt: int = 1, **settings: Any
) -> list[Any]:
    """Train another attempt to its end, from the copies in memory; return what its ranks hold."""
    config = config_of(copy_every=COPY_EVERY, **settings)
    given = {"folders": folders, "from_memory": COPIED}
    return pool.run(attempt_of, path=path, attempt=attempt, config=config, **given)


def next_plan(nodes: list[Node], alive: Sequence[int], order: Sequence[int], path: Path, world: int) -> Any:
    held = {number: held_copies([copy.to_json() for copy in nodes[number].store.held()]) for number in alive}
    upcoming = NextNodes(order, world // len(order))
    return plan(held, upcoming, read_lineage(RunDir(path)), committed_step=EVERY)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"zero": 0}),
        (2, {"zero": 2, "precision": "bf16"}),
        (2, {"zero": 3}),
        (2, {"zero": 1, "state_dtype": StateDType.bf16, "precision": "bf16"}),
        (2, {"tp": 2}),
        # Experts have moved before the copy, and do again after it.
        (4, {"num_experts": 5, "ep": 2, "zero": 2, "expert_placement": ExpertPlacement.auto}),
    ],
    ids=str,
)
def test_a_lost_node_is_replaced_from_its_neighbours_memory_bit_for_bit(
    ranks: Ranks, nodes: list[Node], tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    pool, path, alone = ranks(world), tmp_path / "run", tmp_path / "alone"
    expected = pool.run(attempt_of, path=alone, attempt=0, config=config_of(**settings))
    trained_until_lost(pool, nodes, path, **settings)
    nodes[1].lose()
    found = next_plan(nodes, [0, 2], [0, 2], path, world)
    assert isinstance(found, FromMemory)
    assert (found.step, found.attempt) == (COPIED, 0)
    assert list(found.fetches) == [2]
    wanted = {fetch.rank: nodes[fetch.source].server.address for fetch in found.fetches[2]}
    lost = range(world // 2, world)
    assert list(wanted) == list(lost)
    bring_copies(nodes[2].store, lost, found.step, found.attempt, wanted, SECRET)
    folders = [nodes[0].store.folder, nodes[2].store.folder]
    assert gone_on(pool, path, folders, **settings) == expected
    assert rows(path) == rows(alone)
    assert read_ledger(RunDir(path)) == read_ledger(RunDir(alone))
    assert (restored(path)["source"], restored(path)["step"]) == ("memory", COPIED)
    moved = [event["attempt"] for event in events_of(path, "experts_moved")]
    assert moved == ([0, 1] if "expert_placement" in settings else [])
    if moved:
        # Who keeps experts where they were does not know where these are.
        gone_on(pool, path, folders, attempt=2, **{**settings, "expert_placement": ExpertPlacement.fixed})
        found = events_of(path, "restored")[-1]
        assert (found["source"], found["step"]) == ("checkpoint", STEPS)
        assert "its experts had moved between ranks" in found["not_from_memory"]


def test_a_node_that_takes_over_its_neighbours_ranks_needs_no_network(
    ranks: Ranks, nodes: list[Node], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    trained_until_lost(ranks(2), nodes, path)
    nodes[1].lose()
    found = next_plan(nodes, [0, 2], [2, 0], path, 2)
    assert {node: [fetch.rank for fetch in fetches] for node, fetches in found.fetches.items()} == {2: [0]}
    wanted = {0: nodes[0].server.address}
    bring_copies(nodes[2].store, range(1), found.step, 0, wanted, SECRET)
    bring_copies(nodes[0].store, range(1, 2), found.step, 0, {}, SECRET)
    assert None not in gone_on(ranks(2), path, [nodes[2].store.folder, nodes[0].store.folder])
    assert restored(path)["source"] == "memory"


def record_of(folder: Path) -> Path:
    """Return the record of a node's copy of the step that was copied last."""
    records = (folder / OWN).glob("*.copy")
    return next(
        record for record in records if json.loads(record.read_text().splitlines()[0])["step"] == COPIED
    )


def change_content(folder: Path, edit: Callable[[bytes], bytes]) -> None:
    content = record_of(folder).with_suffix(".bin")
    content.write_bytes(edit(content.read_bytes()))


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def rewrite(folder: Path, **facts: Any) -> None:
    record = record_of(folder)
    head, *others, _ = record.read_text().splitlines()
    lines = "".join(f"{line}\n" for line in (json.dumps({**json.loads(head), **facts}), *others))
    record.write_text(f"{lines}{checksums.of_file(lines.encode())}\n")


def damage_record(folder: Path) -> None:
    record = record_of(folder)
    record.write_text(record.read_text().replace('"samples":', '"sampler":').replace("F32", "I32", 1))


@pytest.fixture(scope="module")
def interrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was interrupted, its nodes' folders beside it."""
    here = tmp_path_factory.mktemp("interrupted")
    nodes = [Node(here, number) for number in range(2)]
    trained_until_lost(ranks(2), nodes, here / "run")
    for node in nodes:
        node.stop()
    return here


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: change_content(folder, flip_a_bit), "it is damaged: its checksum is"),
        (lambda folder: change_content(folder, lambda content: content[:-100]), "it is cut off"),
        (lambda folder: record_of(folder).unlink(), "it is not there"),
        (lambda folder: rewrite(folder, attempt=3), "of different attempts: [0, 3]"),
        (lambda folder: rewrite(folder, run="another/one"), "its run is another/one, not run/None"),
        (damage_record, "its record is damaged"),
    ],
    ids=["bit flipped", "cut off", "removed", "other attempt", "other run", "record damaged"],
)
def test_a_copy_that_cannot_be_used_sends_all_ranks_to_the_checkpoint(
    ranks: Ranks, interrupted: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    shutil.copytree(interrupted, tmp_path / "copy", ignore=shutil.ignore_patterns("bell"))
    folders = sorted((tmp_path / "copy" / f"orchestra-{os.getuid()}").iterdir())
    damage(folders[1])
    path = tmp_path / "copy" / "run"
    assert None not in gone_on(ranks(2), path, folders)
    event = restored(path)
    assert (event["source"], event["step"]) == ("checkpoint", EVERY)
    assert reason in event["not_from_memory"]
    assert [row["step"] for row in rows(path)] == list(range(1, STEPS + 1))


def test_without_a_folder_the_run_trains_on_and_says_that_nothing_is_copied(
    ranks: Ranks, tmp_path: Path
) -> None:
    config = config_of(copy_every=COPY_EVERY)
    assert None not in ranks(2).run(attempt_of, path=tmp_path, attempt=0, config=config)
    (event,) = events_of(tmp_path, "memory_copies_off")
    assert "gave this rank no folder" in event["cause"]
