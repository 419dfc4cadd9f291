"""Verifying offline: read every byte of a checkpoint once and compare it with the manifest. No torch.

Each file is read from front to back in blocks, so that its checksum, the checksums of its chunks and the
digests of its tensors come from the same read; memory is a few blocks per thread, whatever the sizes. Nothing
that is read is ever executed or unpickled, and nothing is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from checkpointing import catalog
from checkpointing.box import ITEM_BYTES, Box, contiguous_parts
from checkpointing.catalog import StoredCheckpoint
from checkpointing.checkpoint_errors import DamagedError, NoCheckpointError, StorageError
from checkpointing.integrity import checksums
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.manifest import Manifest
from checkpointing.plans import NamedChunk, grouped
from checkpointing.storage import Storage

# How a file is cut into blocks: its chunks, the pieces of large chunks, and the gaps between them. Pure.

# Read at once: enough for a disk's or a bucket's bandwidth.
BLOCK_BYTES = 8 << 20
_NO_BOX = Box((), ())


@dataclass(frozen=True)
class FileSpan:
    """Bytes of a file that are looked at together: those of `box` of a chunk, or bytes of no tensor."""

    begin: int
    num_bytes: int
    box: Box = _NO_BOX
    part: NamedChunk | None = None


def spans_of(parts: Iterable[NamedChunk], size: int) -> Iterator[FileSpan]:
    """Cut a file of `size` bytes, with these chunks in order, into spans that follow each other, none
    larger than a block.
    """
    end = 0
    for part in parts:
        if not part.chunk.num_bytes:
            # Nothing of it lies anywhere: where it is said to begin means nothing.
            yield FileSpan(end, 0, part.chunk.box, part)
            continue
        yield from _gap(end, part.chunk.begin)
        end = part.chunk.begin
        item_bytes = ITEM_BYTES[part.dtype]
        for box in contiguous_parts(part.chunk.box, BLOCK_BYTES // item_bytes):
            yield FileSpan(end, box.num_elements * item_bytes, box, part)
            end += box.num_elements * item_bytes
    yield from _gap(end, size)


def _gap(begin: int, end: int) -> Iterator[FileSpan]:
    for first in range(begin, end, BLOCK_BYTES):
        yield FileSpan(first, min(BLOCK_BYTES, end - first))


def contents(
    block: memoryview, spans: Sequence[FileSpan]
) -> Iterator[tuple[FileSpan, NamedChunk, memoryview]]:
    """Yield each span of a block that belongs to a chunk, with the chunk and the span's bytes."""
    for span in spans:
        if span.part is not None:
            begin = span.begin - spans[0].begin
            yield span, span.part, block[begin : begin + span.num_bytes]


# One block is read while another one is looked at.
_BLOCKS_PER_THREAD = 2
# Tensors that a damage of a whole file names.
_NUM_NAMED = 5


@dataclass(frozen=True)
class Damage:
    """What is wrong, and where: `tensor` is None where the file as a whole is meant, `file` is None where a
    tensor does not have its digest although each of its chunks is as it was written.
    """

    file: str | None
    tensor: str | None
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.what) if part)


@dataclass(frozen=True)
class VerifyReport:
    """What verifying one checkpoint found, in order of files and tensors.

    `num_bytes` were read. `strays` are files in the checkpoint's folder that it does not list: no damage,
    since nobody reads them.
    """

    step: int
    num_files: int
    num_tensors: int
    num_bytes: int
    damages: tuple[Damage, ...]
    strays: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        return not self.damages


def verify(storage: Storage, checkpoint: StoredCheckpoint | int, num_threads: int = 4) -> VerifyReport:
    """Read all of a checkpoint and report each damage; of a step: the one that has its name. *One process.*

    Raises NoCheckpointError where it is not there (any more), StorageError where not even its folder can be
    read; a file that cannot be read counts as damaged.
    """
    place = catalog.named(checkpoint) if isinstance(checkpoint, int) else checkpoint
    step = place.step
    if storage.size(place.manifest) is None:
        raise NoCheckpointError(f"{storage.place}: no checkpoint of step {step} is committed")
    try:
        manifest = catalog.read_manifest(storage, place)
    except DamagedError as error:
        return VerifyReport(step, 0, 0, 0, (Damage(error.file, error.tensor, error.what),))
    except StorageError as error:
        return VerifyReport(step, 0, 0, 0, (Damage(place.manifest, None, f"it cannot be read: {error}"),))
    findings = _Verification(storage, place.folder, manifest, num_threads).run()
    damages = [
        *itertools.chain.from_iterable(file.damages for file in findings),
        *_wrong_digests(manifest, findings),
    ]
    if damages and storage.size(place.manifest) is None:
        raise NoCheckpointError(f"{storage.place}: the checkpoint of step {step} was removed meanwhile")
    return VerifyReport(
        step=step,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        num_bytes=sum(file.num_bytes for file in findings),
        damages=tuple(damages),
        strays=tuple(catalog.strays(storage, place, manifest)),
    )


@dataclass
class _FileFindings:
    """What one file holds: its damages, the tensors that have one, and the digests of what was read of each
    tensor. `is_whole`: all of it could be read.
    """

    name: str
    damages: list[Damage] = field(default_factory=list)
    damaged_tensors: set[str] = field(default_factory=set)
    digests: list[tuple[str, int]] = field(default_factory=list)
    num_bytes: int = 0
    is_whole: bool = False


class _Verification:
    """Reads the files of one checkpoint, several at once; digests are taken while the next block is read."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, num_threads: int) -> None:
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self._num_threads = max(1, num_threads)
        self._parts_of: dict[str, list[NamedChunk]] = {name: [] for name in manifest.files}
        for name, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                self._parts_of[chunk.file].append(NamedChunk(name, tensor.dtype, chunk))
        # Memory that is free; the next block waits for it.
        self._memory: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(self._num_threads * _BLOCKS_PER_THREAD):
            self._memory.put(bytearray())

    def run(self) -> list[_FileFindings]:
        """Return what each file holds, in order of their names."""
        with (
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="verify-digest") as pool,
            ThreadPoolExecutor(self._num_threads, thread_name_prefix="verify-read") as readers,
        ):
            return list(readers.map(lambda name: self._file(name, pool), sorted(self._manifest.files)))

    def _file(self, name: str, pool: ThreadPoolExecutor) -> _FileFindings:
        file = _FileFindings(name)
        parts = sorted(self._parts_of[name], key=lambda part: (part.chunk.begin, part.chunk.num_bytes))
        try:
            size = self._storage.size(f"{self._folder}/{name}")
            if size is None:
                file.damages.append(Damage(name, None, f"it is missing{_held(parts)}"))
                return file
            self._content(file, parts, size, pool)
        except StorageError as error:
            file.damages.append(Damage(name, None, f"it cannot be read: {error}"))
        return file

    def _content(
        self, file: _FileFindings, parts: Sequence[NamedChunk], size: int, pool: ThreadPoolExecutor
    ) -> None:
        expected = self._manifest.files[file.name]
        if size != expected.num_bytes:
            lost = [part for part in parts if part.chunk.end > size]
            what = f"it has {size} bytes, expected {expected.num_bytes}{_held(lost)}"
            file.damages.append(Damage(file.name, None, what))
        there = [part for part in parts if part.chunk.end <= size]
        sums = _FileSums(file)
        taken: list[Future[list[tuple[str, int]]]] = []
        cut = spans_of(there, min(size, expected.num_bytes))
        for spans in grouped(cut, lambda span: span.num_bytes, BLOCK_BYTES):
            block = self._read(file, spans)
            sums.add(block, spans)
            taken.append(pool.submit(self._digests, block, spans))
        file.digests = [entry for future in taken for entry in future.result()]
        file.is_whole = size >= expected.num_bytes
        sums.conclude(there, expected.checksum)

    def _read(self, file: _FileFindings, spans: Sequence[FileSpan]) -> memoryview:
        """Read the bytes of some spans into memory that is free; `_digests` gives it back."""
        num_bytes = sum(span.num_bytes for span in spans)
        memory = self._memory.get()
        try:
            if len(memory) < num_bytes:
                memory = bytearray(num_bytes)
            block = memoryview(memory)[:num_bytes]
            path = f"{self._folder}/{file.name}"
            self._storage.read_into(path, spans[0].begin, block)
        except BaseException:
            self._memory.put(memory)
            raise
        file.num_bytes += num_bytes
        return block

    def _digests(self, block: memoryview, spans: Sequence[FileSpan]) -> list[tuple[str, int]]:
        try:
            return [
                (part.name, part_digest(content, part.dtype, span.box))
                for span, part, content in contents(block, spans)
            ]
        finally:
            memory = block.obj
            assert isinstance(memory, bytearray)
            self._memory.put(memory)


class _FileSums:
    """The checksums of one file and of its chunks, while its bytes pass."""

    def __init__(self, file: _FileFindings) -> None:
        self._findings = file
        self._file = checksums.FileChecksum()
        self._chunk = checksums.ChunkChecksum()
        self._differing: dict[str, list[str]] = {}

    def add(self, block: memoryview, spans: Sequence[FileSpan]) -> None:
        """Take in the file's next bytes."""
        self._file.update(block)
        for span, part, content in contents(block, spans):
            self._chunk.update(content)
            if not span.num_bytes or span.begin + span.num_bytes == part.chunk.end:
                self._end_chunk(part)

    def _end_chunk(self, part: NamedChunk) -> None:
        value = self._chunk.hexdigest()
        self._chunk = checksums.ChunkChecksum()
        if value != part.chunk.checksum:
            what = f"{part.chunk.box.label()} has the checksum {value}, expected {part.chunk.checksum}"
            self._differing.setdefault(part.name, []).append(what)

    def conclude(self, parts: Sequence[NamedChunk], expected: str) -> None:
        """Note what differs: the tensors, or the file where it is none of them."""
        num_chunks = Counter(part.name for part in parts)
        for name, differing in self._differing.items():
            count = f"{len(differing)} of its {num_chunks[name]} chunks in this file differ: "
            what = f"chunk {differing[0]}" if num_chunks[name] == 1 else f"{count}{differing[0]}"
            self._findings.damages.append(Damage(self._findings.name, name, what))
        self._findings.damaged_tensors |= self._differing.keys()
        value = self._file.hexdigest()
        if not self._findings.damages and value != expected:
            what = (
                f"it has the checksum {value}, expected {expected}; its tensors are right, its header is not"
            )
            self._findings.damages.append(Damage(self._findings.name, None, what))


def _wrong_digests(manifest: Manifest, findings: Iterable[_FileFindings]) -> Iterator[Damage]:
    """Yield the tensors whose chunks are all right and together are not what the digest says."""
    parts: dict[str, list[int]] = {name: [] for name in manifest.tensors}
    damaged: set[str] = set()
    unread: set[str] = set()
    for file in findings:
        damaged |= file.damaged_tensors
        if not file.is_whole:
            unread.add(file.name)
        for name, value in file.digests:
            parts[name].append(value)
    for name, tensor in manifest.tensors.items():
        if name in damaged or any(chunk.file in unread for chunk in tensor.chunks):
            continue
        total = checksums.written(checksums.combined(parts[name]))
        if total != tensor.digest:
            yield Damage(None, name, f"its digest is {total}, expected {tensor.digest}")


def _held(parts: Iterable[NamedChunk]) -> str:
    names = list(dict.fromkeys(part.name for part in parts))
    if not names:
        return ""
    if len(names) == 1:
        return f"; lost: a part of {names[0]}"
    some = ", ".join(names[:_NUM_NAMED]) + (", …" if len(names) > _NUM_NAMED else "")
    return f"; lost: parts of {len(names)} tensors ({some})"
