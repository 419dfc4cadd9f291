"""Damage of every kind: found by reading, told with file and tensor, and nothing of it executed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from sample_checkpoint import arrays, memory, write

from checkpointing import catalog
from checkpointing import verify as verify_module
from checkpointing.checkpoint_errors import NoCheckpointError, StorageError
from checkpointing.manifest import MANIFEST, Manifest, encode
from checkpointing.storage import Storage
from checkpointing.verify import Damage, VerifyReport, verify

STEP = 100


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

    def flip(self, name: str, position: int) -> None:
        """Change one bit; the second time it is as it was."""
        content = self.get(name)
        content[position] ^= 0x10
        self.put(name, content)

    def verify(self) -> VerifyReport:
        return verify(self.storage, STEP, num_threads=2)

    def places(self) -> list[tuple[str | None, str | None]]:
        return [(damage.file, damage.tensor) for damage in self.verify().damages]


@pytest.fixture
def place(storage: Storage, tmp_path: Path) -> Place:
    return Place(storage, tmp_path / "canary")


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (self._canary,))


def test_an_intact_checkpoint_is_read_as_a_whole_and_a_stale_shard_beside_it_is_told(place: Place) -> None:
    report = place.verify()
    assert report.is_intact
    assert report.strays == ()
    assert (report.step, report.num_files, report.num_tensors) == (STEP, 2, len(arrays()))
    assert report.num_bytes == place.manifest.num_bytes
    place.put("00003-00.safetensors", place.get(place.file(1)))
    assert place.verify() == replace(report, strays=("00003-00.safetensors",))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
def test_the_report_depends_neither_on_threads_nor_on_blocks(
    place: Place, monkeypatch: pytest.MonkeyPatch, num_threads: int, block_bytes: int
) -> None:
    intact = place.verify()
    place.flip(place.file(1), -3)
    damaged = place.verify()
    monkeypatch.setattr(verify_module, "BLOCK_BYTES", block_bytes)
    assert verify(place.storage, STEP, num_threads) == damaged
    place.flip(place.file(1), -3)
    assert verify(place.storage, STEP, num_threads) == intact


def test_every_flipped_bit_is_found_in_its_tensor(place: Place) -> None:
    """One bit in each chunk, and in each part of the file that is no chunk."""
    for name, tensor in place.manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.num_bytes:
                place.flip(chunk.file, chunk.begin + chunk.num_bytes // 2)
                assert place.places() == [(chunk.file, name)]
                place.flip(chunk.file, chunk.begin + chunk.num_bytes // 2)
    for position in (0, 20, 4095):
        place.flip(place.file(0), position)
        (damage,) = place.verify().damages
        assert (damage.file, damage.tensor) == (place.file(0), None)
        assert "its header is not" in damage.what
        place.flip(place.file(0), position)


@pytest.mark.parametrize("num_lost", [1, 100, 5000])
def test_a_truncated_file_names_the_tensors_that_it_lost(place: Place, num_lost: int) -> None:
    name = place.file(1)
    content = place.get(name)
    place.put(name, content[:-num_lost])
    (damage,) = place.verify().damages
    assert damage.file == name
    assert f"it has {len(content) - num_lost} bytes, expected {len(content)}; lost: " in damage.what
    lost = max(
        (chunk.end, tensor_name)
        for tensor_name, tensor in place.manifest.tensors.items()
        for chunk in tensor.chunks
        if chunk.file == name
    )
    assert lost[1] in damage.what


def test_a_shard_that_is_deleted_or_grew_is_one_damage_of_the_file(place: Place) -> None:
    name = place.file(0)
    content = place.get(name)
    place.put(name, content + b"\0")
    assert place.places() == [(name, None)]
    place.storage.remove(catalog.file_path(STEP, name))
    (damage,) = place.verify().damages
    assert (damage.file, damage.tensor) == (name, None)
    assert damage.what.startswith("it is missing; lost: parts of")
    assert "model." in damage.what


def stale(world_size: int = 2) -> bytes:
    """Return the second file of another checkpoint."""
    storage = memory()
    other = write(storage, STEP, arrays(seed=1), world_size=world_size)
    return storage.get(catalog.file_path(STEP, sorted(other.files)[1]))


def with_zeroed_page(content: bytearray, page: int) -> bytearray:
    content[page * 4096 : (page + 1) * 4096] = bytes(4096)
    return content


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda place: place.get(place.file(0)), id="another rank's"),
        pytest.param(lambda _: stale(world_size=4), id="of a larger world"),
        pytest.param(lambda _: stale(), id="of an older step"),
        pytest.param(lambda _: save({"model.rows": np.zeros((19, 13), np.float32)}), id="another whole file"),
        pytest.param(lambda place: with_zeroed_page(place.get(place.file(1)), 0), id="header zeroed"),
        pytest.param(lambda place: with_zeroed_page(place.get(place.file(1)), 3), id="page zeroed"),
    ],
)
def test_another_file_in_the_place_of_a_shard_is_found(
    place: Place, changed: Callable[[Place], bytes]
) -> None:
    place.put(place.file(1), changed(place))
    assert {damage.file for damage in place.verify().damages} == {place.file(1)}


@pytest.mark.parametrize("kind", ["shard", "shard of its size", "manifest"])
def test_a_malicious_pickle_is_found_and_not_executed(place: Place, kind: str) -> None:
    name = MANIFEST if kind == "manifest" else place.file(0)
    content = pickle.dumps(Malicious(place.canary))
    if kind == "shard of its size":
        content = content.ljust(place.manifest.files[name].num_bytes, b"\0")
    place.put(name, content)
    assert {damage.file for damage in place.verify().damages} == {name}
    assert not place.canary.exists()
    # It would have.
    pickle.loads(content)
    assert place.canary.exists()


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

    class Closed(Unreadable):
        def get(self, path: str) -> bytes:
            raise StorageError(f"{path}: Permission denied")

    place.storage.__class__ = Closed
    (damage,) = place.verify().damages
    assert damage.what.endswith("manifest.json: Permission denied")


def test_a_checkpoint_that_is_not_there_or_goes_meanwhile_is_no_damage(place: Place) -> None:
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 99 is committed"):
        verify(place.storage, 99)

    (there,) = catalog.stored(place.storage)

    class Vanishing(type(place.storage)):  # type: ignore[misc]
        def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
            if not path.endswith(MANIFEST):
                catalog.remove_checkpoint(place.storage, there)
            super().read_into(path, begin, buffer)

    place.storage.__class__ = Vanishing
    with pytest.raises(NoCheckpointError, match="was removed meanwhile"):
        place.verify()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_of_any_byte_of_any_file_is_found(data: st.DataObject) -> None:
    place = Place(memory(), Path("unused"))
    name = data.draw(st.sampled_from(sorted(place.manifest.files)))
    content = place.get(name)
    before = bytes(content)
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    place.put(name, content)
    assert place.verify().is_intact == (content == before)
