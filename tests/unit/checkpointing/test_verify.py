"""Damage of every kind: found by reading, told with file and tensor, and nothing of it executed."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from sample_checkpoint import arrays, write

from checkpointing import catalog
from checkpointing import verify as verify_module
from checkpointing.checkpoint_errors import DamagedError, NoCheckpointError, StorageError
from checkpointing.manifest import MANIFEST, Manifest, decode, encode
from checkpointing.storage import Storage
from checkpointing.storage.local import LocalStorage
from checkpointing.storage.remote import RemoteStorage
from checkpointing.verify import Damage, VerifyReport, verify

STEP = 100
FIRST, SECOND = "00000-00.safetensors", "00001-00.safetensors"


class Place:
    """A checkpoint of two ranks, and the means to damage it."""

    def __init__(self, storage: Storage, canary: Path) -> None:
        self.storage = storage
        self.canary = canary
        self.manifest: Manifest = write(storage, STEP, state={"samples": 1600})

    def file(self, number: int) -> str:
        return sorted(self.manifest.files)[number]

    def get(self, name: str) -> bytearray:
        return bytearray(self.storage.get(catalog.file_path(STEP, name)))

    def put(self, name: str, content: bytes | bytearray) -> None:
        self.storage.put(catalog.file_path(STEP, name), bytes(content))

    def verify(self) -> VerifyReport:
        return verify(self.storage, STEP, num_threads=2)

    def places(self) -> list[tuple[str | None, str | None]]:
        return [(damage.file, damage.tensor) for damage in self.verify().damages]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    is_local = request.param == "local"
    storage: Storage = LocalStorage(tmp_path / "checkpoints") if is_local else memory()
    return Place(storage, tmp_path / "canary")


def memory() -> RemoteStorage:
    return RemoteStorage(f"memory://{uuid.uuid4()}/checkpoints")


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (self._canary,))


def test_an_intact_checkpoint_is_read_as_a_whole(place: Place) -> None:
    report = place.verify()
    assert report.is_intact
    assert report.strays == ()
    assert (report.step, report.num_files, report.num_tensors) == (STEP, 2, len(arrays()))
    assert report.num_bytes == place.manifest.num_bytes


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
def test_the_report_depends_neither_on_threads_nor_on_blocks(
    place: Place, monkeypatch: pytest.MonkeyPatch, num_threads: int, block_bytes: int
) -> None:
    expected = [place.verify()]
    content = place.get(place.file(1))
    content[-3] ^= 0x04
    place.put(place.file(1), content)
    expected.append(place.verify())
    monkeypatch.setattr(verify_module, "BLOCK_BYTES", block_bytes)
    assert verify(place.storage, STEP, num_threads) == expected[1]
    content[-3] ^= 0x04
    place.put(place.file(1), content)
    assert verify(place.storage, STEP, num_threads) == expected[0]


def test_every_flipped_bit_is_found_in_its_tensor(place: Place) -> None:
    """One bit in each chunk, and in each part of the file that is no chunk."""
    for name, tensor in place.manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.num_bytes:
                content = place.get(chunk.file)
                content[chunk.begin + chunk.num_bytes // 2] ^= 0x10
                place.put(chunk.file, content)
                assert place.places() == [(chunk.file, name)]
                content[chunk.begin + chunk.num_bytes // 2] ^= 0x10
                place.put(chunk.file, content)
    for position in (0, 20, 4095):
        content = place.get(place.file(0))
        content[position] ^= 0x10
        place.put(place.file(0), content)
        (damage,) = place.verify().damages
        assert (damage.file, damage.tensor) == (place.file(0), None)
        assert "its header is not" in damage.what
        content[position] ^= 0x10
        place.put(place.file(0), content)


@pytest.mark.parametrize("num_lost", [1, 100, 5000])
def test_a_truncated_file_names_the_tensors_that_it_lost(place: Place, num_lost: int) -> None:
    name = place.file(1)
    content = place.get(name)
    place.put(name, content[:-num_lost])
    (damage,) = place.verify().damages
    assert damage.file == name
    assert f"it has {len(content) - num_lost} bytes, expected {len(content)}; lost: " in damage.what
    lost = max(
        (chunk.begin + chunk.num_bytes, tensor)
        for tensor, found in place.manifest.tensors.items()
        for chunk in found.chunks
        if chunk.file == name
    )
    assert lost[1] in damage.what


def test_a_file_that_grew_is_damaged(place: Place) -> None:
    place.put(place.file(0), place.get(place.file(0)) + b"\0")
    (damage,) = place.verify().damages
    assert (damage.file, damage.tensor) == (place.file(0), None)


def test_a_deleted_shard_is_named_with_what_it_held(place: Place) -> None:
    place.storage.remove(catalog.file_path(STEP, place.file(0)))
    (damage,) = place.verify().damages
    assert damage.file == place.file(0)
    assert damage.what.startswith("it is missing; lost: parts of")
    assert "model." in damage.what


def tensors_in(manifest: Manifest, file: str) -> set[str]:
    """Return the tensors that have bytes in a file."""
    return {
        name
        for name, tensor in manifest.tensors.items()
        if any(chunk.file == file and chunk.num_bytes for chunk in tensor.chunks)
    }


def test_two_swapped_shards_are_found_in_both(place: Place) -> None:
    first, second = place.file(0), place.file(1)
    contents = place.get(first), place.get(second)
    place.put(first, contents[1])
    place.put(second, contents[0])
    assert {damage.file for damage in place.verify().damages} == {first, second}


def test_swapped_shards_of_the_same_size_are_found_in_each_of_their_tensors() -> None:
    storage = memory()
    values = {name: array[:36] for name, array in arrays().items() if name.startswith("model.")}
    values = {name: array[: len(array) // 2 * 2] for name, array in values.items()}
    manifest = write(storage, STEP, values)
    first, second = (catalog.file_path(STEP, name) for name in sorted(manifest.files))
    contents = storage.get(first), storage.get(second)
    assert len(contents[0]) == len(contents[1])
    storage.put(first, contents[1])
    storage.put(second, contents[0])
    found = {(damage.file, damage.tensor) for damage in verify(storage, STEP).damages}
    assert found == {(file, name) for file in manifest.files for name in tensors_in(manifest, file)}


def test_a_stale_shard_of_a_larger_world_is_found_in_the_place_of_a_new_one(place: Place) -> None:
    larger = memory()
    other = write(larger, STEP, arrays(seed=1), world_size=4)
    stale = larger.get(catalog.file_path(STEP, sorted(other.files)[1]))
    place.put(place.file(1), stale)
    assert {damage.file for damage in place.verify().damages} == {place.file(1)}


def test_a_stale_shard_beside_the_new_ones_is_told_and_harms_nothing(place: Place) -> None:
    place.put("00003-00.safetensors", place.get(place.file(1)))
    report = place.verify()
    assert report.is_intact
    assert report.strays == ("00003-00.safetensors",)


def test_the_shard_of_an_older_step_is_found(place: Place) -> None:
    other = memory()
    older = write(other, STEP - 1, arrays(seed=1))
    name = place.file(1)
    place.put(name, other.get(catalog.file_path(STEP - 1, sorted(older.files)[1])))
    assert set(place.places()) >= {(name, tensor) for tensor in tensors_in(place.manifest, name)} - {
        (name, "empty")
    }


def test_an_edited_manifest_is_damage_of_the_manifest(place: Place) -> None:
    document = json.loads(place.get(MANIFEST))
    document["state"]["samples"] = 0
    place.put(MANIFEST, json.dumps(document).encode())
    report = place.verify()
    assert [(damage.file, damage.tensor) for damage in report.damages] == [(MANIFEST, None)]
    assert "edited" in report.damages[0].what
    assert report.num_bytes == 0


@pytest.mark.parametrize("fills_its_place", [True, False])
def test_a_malicious_pickle_in_the_place_of_a_shard_is_found_and_not_executed(
    place: Place, fills_its_place: bool
) -> None:
    name = place.file(0)
    content = pickle.dumps(Malicious(place.canary))
    if fills_its_place:
        content = content.ljust(place.manifest.files[name].num_bytes, b"\0")
    place.put(name, content)
    assert {damage.file for damage in place.verify().damages} == {name}
    assert not place.canary.exists()
    # It would have.
    pickle.loads(content)
    assert place.canary.exists()


def test_a_pickle_in_the_place_of_the_manifest_is_found_and_not_executed(place: Place) -> None:
    place.put(MANIFEST, pickle.dumps(Malicious(place.canary)))
    assert place.places() == [(MANIFEST, None)]
    assert not place.canary.exists()


@pytest.mark.parametrize("page", [0, 1, 3])
def test_a_zeroed_page_is_found(place: Place, page: int) -> None:
    name = place.file(1)
    content = place.get(name)
    content[page * 4096 : (page + 1) * 4096] = bytes(4096)
    place.put(name, content[: place.manifest.files[name].num_bytes])
    damages = place.verify().damages
    assert {damage.file for damage in damages} == {name}
    assert all(damage.tensor is None for damage in damages) == (page == 0)


def test_another_tensor_file_with_valid_content_is_found(place: Place) -> None:
    place.put(place.file(0), save({"model.rows": np.zeros((19, 13), np.float32)}))
    assert {damage.file for damage in place.verify().damages} == {place.file(0)}


def test_a_digest_that_is_not_that_of_the_content_names_the_tensor(place: Place) -> None:
    wrong = replace(place.manifest.tensors["model.rows"], digest="0123456789abcdef")
    forged = replace(place.manifest, tensors={**place.manifest.tensors, "model.rows": wrong})
    place.put(MANIFEST, encode(forged))
    (damage,) = place.verify().damages
    assert (damage.file, damage.tensor) == (None, "model.rows")
    assert "expected 0123456789abcdef" in damage.what


def test_a_file_that_cannot_be_read_counts_as_damaged_and_the_others_are_read(place: Place) -> None:
    class Unreadable(type(place.storage)):  # type: ignore[misc]
        def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
            if path.endswith(place.file(0)):
                raise StorageError("Input/output error")
            super().read_into(path, begin, buffer)

    place.storage.__class__ = Unreadable
    report = place.verify()
    assert report.damages == (Damage(place.file(0), None, "it cannot be read: Input/output error"),)
    assert report.num_bytes == place.manifest.files[place.file(1)].num_bytes


def test_a_checkpoint_that_is_not_there_or_goes_meanwhile_is_no_damage(place: Place) -> None:
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 99 is committed"):
        verify(place.storage, 99)

    class Vanishing(type(place.storage)):  # type: ignore[misc]
        def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
            catalog.remove_checkpoint(self, STEP)
            super().read_into(path, begin, buffer)

    place.storage.__class__ = Vanishing
    with pytest.raises(NoCheckpointError, match="was removed meanwhile"):
        place.verify()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_of_any_byte_of_any_file_is_found(data: st.DataObject) -> None:
    place = Place(memory(), Path("unused"))
    name = data.draw(st.sampled_from([*sorted(place.manifest.files), MANIFEST]))
    content = place.get(name)
    before = bytes(content)
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    place.put(name, content)
    # JSON has more than one way to write the same.
    is_same = decode_or_none(content) == place.manifest if name == MANIFEST else content == before
    assert place.verify().is_intact == is_same


def decode_or_none(content: bytearray) -> Manifest | None:
    try:
        return decode(bytes(content))
    except DamagedError:
        return None
