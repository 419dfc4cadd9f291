"""Copies in memory: a node is lost, another one fetches what it held, and the run goes on bit for bit.

Each node is a folder of its own; the copies travel by real TCP on the loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from small_trainings import mesh_of

from checkpointing import checksums
from checkpointing.shards import Shard, as_bytes
from conf.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    RecoveryConfig,
    StateDType,
    TrainConfig,
)
from launchers.memory_store.exchange import CopyPusher, CopyServer, WantedCopy, bring_copies
from launchers.memory_store.store import FOLDER_VARIABLE, OWN, CopyStore, open_copy_store
from orchestra.data.ledger import read_ledger
from orchestra.parallel.mesh import RankEnvironment
from orchestra.recovery.copies import FromMemory, NextNodes, begins, held_copies, plan
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import layout
from orchestra.train import memory_copies, trainer
from orchestra.train.state import TensorState
from orchestra.train.trainer import RankAttempt, Trainer, TrainingProgress, train_on
from orchestra.train.watch import inject_faults

pytestmark = pytest.mark.ranks

STEPS, EVERY = 12, 5
# Two updates come after the last copy: had one of them not waited for it, it would hold other values.
COPY_EVERY, COPIED, KILL_AT = 3, 6, 9
SECRET = "of the test"
Ranks = Callable[[int], RankPool]


class Interruption(Exception):  # noqa: N818  no error, the plan
    """Stands for the end of the process, so that the pool's processes can be used again."""


def config_of(
    precision: str = "fp32",
    state_dtype: str = "fp32",
    copy_every: int | None = COPY_EVERY,
    **parallelism: Any,
) -> Config:
    """Return a tiny model with odd dims, whose tensors no number of ranks divides."""
    sizes = {"hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 259}
    return Config(
        model=ModelConfig(**sizes, num_attention_heads=4, num_key_value_heads=2),
        parallelism=ParallelismConfig(**{"bucket_mib": 0.01, **parallelism}),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3, state_dtype=StateDType(state_dtype)),
        train=TrainConfig(steps=STEPS, seq_len=16, global_batch_size=8, micro_batch_size=1),
        data=DataConfig(ledger=True),
        checkpoint=CheckpointConfig(every_steps=EVERY, async_save=False, timeout_s=60.0),
        recovery=RecoveryConfig(memory_copy_every_steps=copy_every),
    )


@dataclass(frozen=True)
class Plan:
    """One attempt: what the ranks are told. `folders` by node."""

    path: Path
    attempt: int
    config: Config
    folders: Sequence[Path | None]
    kill_at: int | None = None
    from_memory: int | None = None


def attempt_of(rank: int, world: int, it: Plan) -> dict[str, str] | None:
    """Train one attempt as one rank; return the digest of each tensor at its end, None if it was ended.

    Each copy begins late, when the next step is well under way: an update that did not wait would be seen.
    """
    per_node = world // len(it.folders)
    folder = it.folders[rank // per_node]
    os.environ.pop(FOLDER_VARIABLE, None)
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = str(folder)
    mesh = mesh_of(rank, layout(it.config.parallelism, world))
    events = EventWriter(RunDir(it.path), rank_writer(it.attempt, rank), it.attempt, rank=rank)
    torch.manual_seed(it.attempt)  # so that only a restore can bring the generators back
    strike, inject_faults.Faults.strike = inject_faults.Faults.strike, _interruption(it.kill_at)  # type: ignore[method-assign]
    copy, memory_copies.DeviceCopier.copy = memory_copies.DeviceCopier.copy, _late_copy  # type: ignore[method-assign]
    attempt = RankAttempt(RunDir(it.path), it.attempt, events, TrainingProgress(), it.from_memory)
    trainers: list[Trainer] = []
    assemble, trainer.assemble = trainer.assemble, _kept_in(trainers)
    try:
        training = train_on(mesh, it.config, RankEnvironment(rank, rank % per_node, world, per_node), attempt)
    except Interruption:
        # A process that ends leaves nothing under way. This one goes on, and the memory of messages under way
        # must not be released before they have come.
        trainers[0].built.parallelized.stage.settle()
        return None
    finally:
        trainer.assemble = assemble
        inject_faults.Faults.strike = strike  # type: ignore[method-assign]
        memory_copies.DeviceCopier.copy = copy  # type: ignore[method-assign]
    state = TensorState(training.parallelized, training.optimizer, mesh)
    return digests(state.snapshot())


def _kept_in(trainers: list[Trainer]) -> Callable[..., Trainer]:
    assemble = trainer.assemble

    def kept(*arguments: Any) -> Trainer:
        trainers.append(assemble(*arguments))
        return trainers[-1]

    return kept


def _interruption(kill_at: int | None) -> Callable[..., None]:
    def strike(_: Any, phase: str, step: int, *__: Any) -> None:
        if (phase, step) == ("step", kill_at):
            raise Interruption

    return strike


_copy = memory_copies.DeviceCopier.copy


def _late_copy(self: Any, *arguments: Any) -> None:
    time.sleep(0.15)
    _copy(self, *arguments)


def digests(shards: Sequence[Shard]) -> dict[str, str]:
    return {f"{it.name}{it.box.label()}": checksums.of_file(bits(it.tensor)) for it in shards}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(as_bytes(tensor.detach().contiguous()).numpy())


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


def await_that(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def trained_until_lost(pool: RankPool, nodes: list[Node], path: Path, config: Config) -> None:
    """Train the first attempt on two nodes until it is interrupted; all that was copied has been sent."""
    per_node = pool.size // 2
    for number in (0, 1):
        nodes[number].push(range(number * per_node, (number + 1) * per_node), 0, nodes[1 - number])
    folders = [node.store.folder for node in nodes[:2]]
    ended = pool.run(attempt_of, world=pool.size, it=Plan(path, 0, config, folders, kill_at=KILL_AT))
    assert ended == [None] * pool.size
    await_that(lambda: all(it.pusher is not None and it.pusher.pushed_step == COPIED for it in nodes[:2]))


def next_plan(nodes: list[Node], alive: Sequence[int], order: Sequence[int], path: Path, world: int) -> Any:
    held = {number: held_copies([it.to_json() for it in nodes[number].store.held()]) for number in alive}
    upcoming = NextNodes(order, world // len(order))
    return plan(held, upcoming, begins(read_events(RunDir(path))), committed_step=EVERY)


KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "nonfinite_steps")


def rows(path: Path) -> list[Record]:
    return [{key: row[key] for key in KEYS} for row in read_metrics(RunDir(path))]


def restored(path: Path) -> Record:
    return [event for event in read_events(RunDir(path)) if event["event"] == "restored"][-1]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"zero": 0}),
        (2, {"zero": 1}),
        (2, {"zero": 2, "precision": "bf16"}),
        (2, {"zero": 3}),
        (2, {"zero": 1, "state_dtype": "bf16", "precision": "bf16"}),
        (2, {"tp": 2, "zero": 0}),
        (4, {"tp": 2, "zero": 2}),
    ],
    ids=lambda it: "-".join(f"{key}={value}" for key, value in it.items()) if isinstance(it, dict) else None,
)
def test_a_lost_node_is_replaced_from_its_neighbours_memory_bit_for_bit(
    ranks: Ranks, nodes: list[Node], tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    pool, path, alone = ranks(world), tmp_path / "run", tmp_path / "alone"
    config = config_of(**settings)
    without = replace(config, recovery=RecoveryConfig())
    expected = pool.run(attempt_of, world=world, it=Plan(alone, 0, without, [None]))
    trained_until_lost(pool, nodes, path, config)
    nodes[1].lose()
    found = next_plan(nodes, [0, 2], [0, 2], path, world)
    assert isinstance(found, FromMemory)
    assert (found.step, found.attempt) == (COPIED, 0)
    assert list(found.fetches) == [2]
    wanted = [WantedCopy(it.rank, nodes[it.source].server.address) for it in found.fetches[2]]
    lost = range(world // 2, world)
    assert [it.rank for it in wanted] == list(lost)
    bring_copies(nodes[2].store, lost, found.step, found.attempt, wanted, SECRET)
    folders = [nodes[0].store.folder, nodes[2].store.folder]
    again = Plan(path, 1, config, folders, from_memory=found.step)
    assert pool.run(attempt_of, world=world, it=again) == expected
    assert rows(path) == rows(alone)
    assert read_ledger(RunDir(path)) == read_ledger(RunDir(alone))
    assert (restored(path)["source"], restored(path)["step"]) == ("memory", COPIED)


def test_a_node_that_takes_over_its_neighbours_ranks_needs_no_network(
    ranks: Ranks, nodes: list[Node], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    trained_until_lost(ranks(2), nodes, path, config_of())
    nodes[1].lose()
    found = next_plan(nodes, [0, 2], [2, 0], path, 2)
    assert {node: [it.rank for it in fetches] for node, fetches in found.fetches.items()} == {2: [0]}
    wanted = [WantedCopy(0, nodes[0].server.address)]
    bring_copies(nodes[2].store, range(1), found.step, 0, wanted, SECRET)
    bring_copies(nodes[0].store, range(1, 2), found.step, 0, [], SECRET)
    folders = [nodes[2].store.folder, nodes[0].store.folder]
    ended = ranks(2).run(attempt_of, world=2, it=Plan(path, 1, config_of(), folders, from_memory=found.step))
    assert None not in ended
    assert restored(path)["source"] == "memory"


def flip_a_bit(folder: Path, step: int) -> None:
    content = record_of(folder, step).with_suffix(".bin")
    changed = bytearray(content.read_bytes())
    changed[len(changed) // 2] ^= 1
    content.write_bytes(changed)


def cut_off(folder: Path, step: int) -> None:
    content = record_of(folder, step).with_suffix(".bin")
    content.write_bytes(content.read_bytes()[:-100])


def remove(folder: Path, step: int) -> None:
    record_of(folder, step).unlink()


def rename_attempt(folder: Path, step: int) -> None:
    rewrite(folder, step, attempt=3)


def rename_run(folder: Path, step: int) -> None:
    rewrite(folder, step, run="another/one")


def damage_record(folder: Path, step: int) -> None:
    record = record_of(folder, step)
    record.write_text(record.read_text().replace('"samples":', '"sampler":').replace("F32", "I32", 1))


def rewrite(folder: Path, step: int, **facts: Any) -> None:
    record = record_of(folder, step)
    head, table, _ = record.read_text().splitlines()
    lines = f"{json.dumps({**json.loads(head), **facts})}\n{table}\n"
    record.write_text(f"{lines}{checksums.of_file(lines.encode())}\n")


def record_of(folder: Path, step: int) -> Path:
    records = (folder / OWN).glob("*.copy")
    return next(it for it in records if json.loads(it.read_text().splitlines()[0])["step"] == step)


@pytest.fixture(scope="module")
def interrupted(_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was interrupted, its nodes' folders beside it."""
    here = tmp_path_factory.mktemp("interrupted")
    if 2 not in _pools or _pools[2].is_broken:
        _pools[2] = RankPool(2)
    nodes = [Node(here, number) for number in range(2)]
    trained_until_lost(_pools[2], nodes, here / "run", config_of())
    for node in nodes:
        node.stop()
    return here


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_bit, "it is damaged: its checksum is"),
        (cut_off, "it is cut off"),
        (remove, "it is not there"),
        (rename_attempt, "of different attempts: [0, 3]"),
        (rename_run, "its run is another/one, not run/None"),
        (damage_record, "its record is damaged"),
    ],
    ids=lambda it: it.__name__ if callable(it) else "",
)
def test_a_copy_that_cannot_be_used_sends_all_ranks_to_the_checkpoint(
    ranks: Ranks, interrupted: Path, tmp_path: Path, damage: Callable[[Path, int], None], reason: str
) -> None:
    shutil.copytree(interrupted, tmp_path / "it", ignore=shutil.ignore_patterns("bell"))
    of_user = tmp_path / "it" / f"orchestra-{os.getuid()}"
    folders = sorted(of_user.iterdir())
    damage(folders[1], COPIED)
    path = tmp_path / "it" / "run"
    again = Plan(path, 1, config_of(), folders, from_memory=COPIED)
    assert None not in ranks(2).run(attempt_of, world=2, it=again)
    told = restored(path)
    assert (told["source"], told["step"]) == ("checkpoint", EVERY)
    assert reason in told["not_from_memory"]
    assert [row["step"] for row in rows(path)] == list(range(1, STEPS + 1))


def test_copies_of_an_attempt_that_the_run_went_back_behind_are_not_taken(interrupted: Path) -> None:
    of_user = interrupted / f"orchestra-{os.getuid()}"
    records = [
        {**json.loads(it.read_text().splitlines()[0])}
        for folder in sorted(of_user.iterdir())
        for it in sorted((folder / OWN).glob("*.copy"))
    ]
    held = {0: held_copies(records)}
    upcoming = NextNodes([0], 2)
    assert isinstance(plan(held, upcoming, {}, EVERY), FromMemory)
    assert isinstance(plan(held, upcoming, {1: COPIED}, EVERY), FromMemory)
    assert not isinstance(plan(held, upcoming, {1: EVERY}, EVERY), FromMemory)


def test_without_a_folder_the_run_trains_on_and_says_that_nothing_is_copied(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert None not in ranks(2).run(attempt_of, world=2, it=Plan(path, 0, config_of(), [None]))
    (told,) = (event for event in read_events(RunDir(path)) if event["event"] == "memory_copies_off")
    assert "gave this rank no folder" in told["cause"]
