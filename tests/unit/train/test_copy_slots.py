"""One rank's copies on a real folder: what is one, what is none, and when there is room for them."""

from __future__ import annotations

import mmap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing.shards import Shard, whole
from launchers.memory_store.store import open_copy_store
from orchestra.sizes.training_shape import NUM_SLOTS
from orchestra.train.copy_files import OWN, Slot, UnusableCopyError, slots_of, table_of
from orchestra.train.memory_copies import Room, room, shortage

FACTS = {"attempt": 0, "rank": 3}


def shards(seed: int = 0) -> list[Shard]:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(7, 5, generator=generator)[:, 1:4]
    return [
        whole("matrix", torch.randn(3, 5, generator=generator)),
        Shard("columns", (7, 9), (0, 2), columns),
        whole("half", torch.randn(11, generator=generator).bfloat16()),
        whole("nothing", torch.zeros(0, 4)),
        whole("bytes", torch.arange(5, dtype=torch.uint8)),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / OWN).mkdir()
    return tmp_path


def committed(folder: Path, step: int, number: int = 0) -> Slot:
    slot, state = Slot(folder, 3, number), shards(step)
    table = table_of(state)
    slot.take(table.num_bytes)
    for view, shard in zip(slot.views(state, table), state, strict=True):
        view.copy_(shard.tensor)
    slot.commit({**FACTS, "step": step}, {"samples": step}, table)
    return slot


def test_what_was_copied_is_read_again_bit_for_bit(folder: Path) -> None:
    committed(folder, 4)
    slot, state = Slot(folder, 3, 0), shards(4)
    assert (slot.head()["step"], slot.document()) == (4, {"samples": 4})
    slot.check(table_of(shards(1)))
    for view, shard in zip(slot.views(state, table_of(state)), state, strict=True):
        assert torch.equal(view, shard.tensor)
        assert view.dtype is shard.tensor.dtype


def test_an_agent_finds_a_copy_however_long_the_state_beside_its_tensors_is(tmp_path: Path) -> None:
    with closing(open_copy_store("run", "node", tmp_path)) as store:
        slot, table = Slot(store.folder, 3, 0), table_of(shards())
        slot.take(table.num_bytes)
        # As many numbers as the placement of 58 layers of 256 experts has.
        document = {"experts": {str(layer): list(range(512)) for layer in range(58)}}
        slot.commit({**FACTS, "step": 4, "layout": {"dp": 4}}, document, table)
        assert [(copy.rank, copy.step, copy.layout) for copy in store.held()] == [(3, 4, {"dp": 4})]
        assert Slot(store.folder, 3, 0).document() == document
        assert len((store.folder / OWN / "rank-00003.slot-0.copy").read_bytes()) > 1 << 16
        # What the agent reads again and again is short.
        assert len((store.folder / OWN / "rank-00003.slot-0.copy").read_bytes().split(b"\n")[0]) < 200
        assert store.unreadable() == []


def test_a_slot_that_is_being_written_is_no_copy(folder: Path) -> None:
    committed(folder, 4).remove_copy()
    with pytest.raises(UnusableCopyError, match="cannot be read"):
        Slot(folder, 3, 0).head()


def test_any_changed_byte_of_content_or_record_is_noticed(folder: Path) -> None:
    slot = committed(folder, 4)
    for byte in (0, 40, 300):
        slot.content[byte] ^= 1
        with pytest.raises(UnusableCopyError, match="it is damaged"):
            Slot(folder, 3, 0).check(table_of(shards()))
        slot.content[byte] ^= 1
    (record,) = (folder / OWN).glob("*.copy")
    text = record.read_bytes()
    for place in range(0, len(text) - 1, 7):
        record.write_bytes(text[:place] + bytes([text[place] ^ 2]) + text[place + 1 :])
        with pytest.raises(UnusableCopyError):
            Slot(folder, 3, 0).head()


def test_tensors_of_another_shape_or_place_are_not_taken(folder: Path) -> None:
    committed(folder, 4)
    first, *rest = shards()
    for other in (replace(first, name="another"), replace(first, shape=(4, 5)), rest[0]):
        with pytest.raises(UnusableCopyError, match="not those that this rank has"):
            Slot(folder, 3, 0).check(table_of([other, *rest]))


def test_slots_without_a_copy_come_first_and_then_the_oldest(folder: Path) -> None:
    committed(folder, 9, number=0)
    committed(folder, 8, number=2)
    found = slots_of(folder, 3)
    assert len(found) == NUM_SLOTS
    with pytest.raises(UnusableCopyError):
        found[0].head()
    assert [slot.head()["step"] for slot in found[1:]] == [8, 9]


def test_memory_that_is_not_there_is_missed_before_it_is_written(folder: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        Slot(folder, 3, 0).take(1 << 60)
    slot = committed(folder, 4)
    assert isinstance(slot._memory, mmap.mmap)
    assert (folder / OWN / "rank-00003.slot-0.bin").stat().st_blocks * 512 >= table_of(shards()).num_bytes


def test_a_node_needs_room_for_its_own_and_its_neighbours_copies() -> None:
    def rooms(free: int) -> list[Room]:
        return [Room(f"node{rank // 2}", 100, free) for rank in range(4)]

    assert shortage(rooms(400), ranks_per_node=2) is None
    assert "its own take 200 bytes, its neighbour's 200 bytes" in str(shortage(rooms(399), ranks_per_node=2))
    assert shortage(rooms(400), ranks_per_node=4) is None
    assert "its neighbour's 0 bytes" in str(shortage(rooms(399), ranks_per_node=4))


def test_a_rank_without_a_folder_says_so(tmp_path: Path) -> None:
    assert "gave this rank no folder" in str(shortage([room(None, 1)], 1))
    assert "No such file" in str(shortage([room(tmp_path / "none", 1)], 1))
    (tmp_path / OWN).mkdir()
    (tmp_path / OWN / "rank-00000.slot-0.bin").write_bytes(bytes(1000))
    assert room(tmp_path, 1).problem is None
