"""The manifest of a checkpoint: what it holds, where each byte lies, and how to tell that it is still the
same.

It is one JSON document. `checksum` covers all the rest (the document without it, keys sorted, no spaces), so
an edited manifest is found; everything else is checked on reading as well, whatever the checksum says, since
what is read here decides which bytes of which files are taken for which tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpointing.box import ITEM_BYTES, Box, overlapping
from checkpointing.checkpoint_errors import DamagedError, NewerVersionError
from checkpointing.integrity import checksums
from checkpointing.lineage import Base

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_CHUNK_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_FILE_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_LARGEST = 1 << 62
_MAX_DIMS = 32


@dataclass(frozen=True)
class Chunk:
    """One piece of a tensor: which elements (`box`), and where its bytes lie: from `begin` on in `file`."""

    box: Box
    file: str
    begin: int
    num_bytes: int
    checksum: str

    @property
    def end(self) -> int:
        """The first byte of the file after the chunk."""
        return self.begin + self.num_bytes


@dataclass(frozen=True)
class Tensor:
    """A whole tensor: safetensors' name of its dtype, its global shape, its digest, and its chunks, which
    hold each element once.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class File:
    """Size in bytes and checksum of one file."""

    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint; `layout` (the mesh that wrote it) and `state` are the user's own JSON.

    `attempt` wrote it, which went on from `base`; older manifests say neither.
    """

    step: int
    generation: int
    created: float
    layout: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, File]
    state: Mapping[str, Any]
    attempt: int | None = None
    base: Base | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def state_digest(self) -> str:
        """The digest of all tensors together: equal for equal states, whatever the layout."""
        return self.digest_of(self.tensors)

    def digest_of(self, names: Iterable[str]) -> str:
        """Return the digest of some of the tensors."""
        chosen = {name: self.tensors[name] for name in names}
        return checksums.state_digest(
            (name, tensor.dtype, tensor.shape, tensor.digest) for name, tensor in chosen.items()
        )


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as it is written."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "generation": manifest.generation,
        **_origin_document(manifest),
        "created": manifest.created,
        "layout": dict(manifest.layout),
        "state_digest": manifest.state_digest,
        "state": dict(manifest.state),
        "files": {
            name: {"bytes": file.num_bytes, "checksum": file.checksum}
            for name, file in manifest.files.items()
        },
        "tensors": {name: _tensor_document(tensor) for name, tensor in manifest.tensors.items()},
    }
    return json.dumps({**document, "checksum": _checksum(document)}, indent=1, allow_nan=False).encode()


def _origin_document(manifest: Manifest) -> dict[str, Any]:
    """Return who wrote it, near the front of the document: `head` reads no more than that."""
    if manifest.attempt is None:
        return {}
    base = manifest.base
    went_on = {} if base is None else {"base": {"step": base.step, "attempt": base.attempt}}
    return {"attempt": manifest.attempt, **went_on}


@dataclass(frozen=True)
class ManifestHead:
    """What the first bytes of a manifest say, unchecked: step, generation, and its attempt where it has
    one.
    """

    step: int
    generation: int
    attempt: int | None


# As much of a manifest as holds its head.
HEAD_BYTES = 256
_HEAD = re.compile(
    rb'\{\s*"schema_version": *\d+,\s*"step": *(\d+),\s*"generation": *(\d+),\s*(?:"attempt": *(\d+),)?\s*"'
)


def head(begin: bytes) -> ManifestHead | None:
    """Return the head of a manifest from its first bytes; None where they are not as `encode` writes them.

    The manifest of a large model takes a second to read and check, its head none.
    """
    match = _HEAD.match(begin)
    if match is None:
        return None
    return ManifestHead(int(match[1]), int(match[2]), None if match[3] is None else int(match[3]))


def _tensor_document(tensor: Tensor) -> dict[str, Any]:
    chunks = [
        {
            "offsets": list(chunk.box.offsets),
            "shape": list(chunk.box.shape),
            "file": chunk.file,
            "begin": chunk.begin,
            "bytes": chunk.num_bytes,
            "checksum": chunk.checksum,
        }
        for chunk in tensor.chunks
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "digest": tensor.digest, "chunks": chunks}


def _checksum(document: Mapping[str, Any]) -> str:
    return checksums.of_file(
        json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    )


def decode(content: bytes) -> Manifest:
    """Read a manifest. Raises DamagedError, and nothing else, for what is not a whole and consistent one."""
    try:
        document = json.loads(content)
        return _decoded(_mapping(document, "the document"))
    except DamagedError:
        raise
    except RecursionError as error:
        raise _damaged("nested too deeply") from error
    except ValueError as error:
        raise _damaged(f"not JSON: {error}") from error


def _decoded(document: dict[str, Any]) -> Manifest:
    version = document.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise NewerVersionError(
            f"schema_version is {version}, of a newer orchestra; this one reads {SCHEMA_VERSION}: use that",
            file=MANIFEST,
        )
    if type(version) is not int or version != SCHEMA_VERSION:
        raise _damaged(f"schema_version is {version!r}, and this orchestra reads {SCHEMA_VERSION}")
    checksum = document.pop("checksum", None)
    expected = _checksum(document)
    if checksum != expected:
        raise _damaged(
            f"it was edited or damaged: its checksum is {checksum!r}, its content has {expected!r}"
        )
    files = {_file_name(name): _file(value, name) for name, value in _field(document, "files", dict).items()}
    tensors = {name: _tensor(value, name, files) for name, value in _field(document, "tensors", dict).items()}
    _refuse_overlaps(tensors, files)
    created = document.get("created")
    if isinstance(created, bool) or not isinstance(created, int | float) or not math.isfinite(created):
        raise _damaged(f"created is {created!r}, expected seconds")
    manifest = Manifest(
        step=_count(document.get("step"), "step"),
        generation=_count(document.get("generation"), "generation"),
        created=created,
        layout=_field(document, "layout", dict),
        tensors=tensors,
        files=files,
        state=_field(document, "state", dict),
        attempt=None if document.get("attempt") is None else _count(document["attempt"], "attempt"),
        base=None if document.get("base") is None else _base(_mapping(document["base"], "base")),
    )
    if manifest.base is not None and manifest.attempt is None:
        raise _damaged("it has a base and no attempt")
    if document.get("state_digest") != manifest.state_digest:
        raise _damaged("state_digest is not that of its tensors")
    return manifest


def _base(document: Mapping[str, Any]) -> Base:
    attempt = document.get("attempt")
    return Base(
        _count(document.get("step"), "step of base"),
        None if attempt is None else _count(attempt, "attempt of base"),
    )


def _tensor(value: Any, name: str, files: Mapping[str, File]) -> Tensor:
    document = _mapping(value, f"tensor {name!r}")
    dtype = document.get("dtype")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise _damaged(f"dtype is {dtype!r}, expected one of {', '.join(ITEM_BYTES)}", name)
    shape = _integers(document.get("shape"), f"shape of {name!r}")
    chunks = tuple(_chunk(part, name, dtype, files) for part in _field(document, "chunks", list))
    if any(not chunk.box.is_inside(shape) for chunk in chunks):
        raise _damaged(f"a chunk lies outside the shape {list(shape)}", name)
    boxes = [chunk.box for chunk in chunks]
    if sum(box.num_elements for box in boxes) != math.prod(shape) or overlapping(boxes) is not None:
        raise _damaged(f"its chunks do not hold each element of the shape {list(shape)} once", name)
    return Tensor(dtype, shape, _text(document.get("digest"), _CHUNK_CHECKSUM, f"digest of {name!r}"), chunks)


def _chunk(value: Any, name: str, dtype: str, files: Mapping[str, File]) -> Chunk:
    document = _mapping(value, f"a chunk of {name!r}")
    offsets = _integers(document.get("offsets"), f"offsets of a chunk of {name!r}")
    shape = _integers(document.get("shape"), f"shape of a chunk of {name!r}")
    if len(offsets) != len(shape):
        raise _damaged("a chunk's offsets and shape differ in length", name)
    chunk = Chunk(
        box=Box(offsets, shape),
        file=_file_name(document.get("file")),
        begin=_count(document.get("begin"), f"begin of a chunk of {name!r}"),
        num_bytes=_count(document.get("bytes"), f"bytes of a chunk of {name!r}"),
        checksum=_text(document.get("checksum"), _CHUNK_CHECKSUM, f"checksum of a chunk of {name!r}"),
    )
    if chunk.num_bytes != chunk.box.num_elements * ITEM_BYTES[dtype]:
        raise _damaged(
            f"a chunk of shape {list(shape)} has {chunk.num_bytes} bytes, which is not its size", name
        )
    if chunk.file not in files or chunk.end > files[chunk.file].num_bytes:
        raise _damaged(f"a chunk lies outside the files that are listed, in {chunk.file}", name)
    return chunk


def _refuse_overlaps(tensors: Mapping[str, Tensor], files: Mapping[str, File]) -> None:
    """Refuse chunks that share bytes: the same bytes cannot be two tensors."""
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            if chunk.num_bytes:
                taken[chunk.file].append((chunk.begin, chunk.end))
    for name, ranges in taken.items():
        ranges.sort()
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges)):
            raise _damaged(f"two chunks share bytes of {name}")


def _file(value: Any, name: str) -> File:
    document = _mapping(value, f"file {name!r}")
    size = _count(document.get("bytes"), f"bytes of {name!r}")
    return File(size, _text(document.get("checksum"), _FILE_CHECKSUM, f"checksum of {name!r}"))


def _file_name(value: Any) -> str:
    # A name, never a path: nothing outside the checkpoint's own folder is ever read.
    return _text(value, _FILE_NAME, "a file's name")


def _text(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise _damaged(f"{what} is {value!r}, expected {pattern.pattern}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _damaged(f"{what} is {value!r}, expected a whole number of at least 0")
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MAX_DIMS:
        raise _damaged(f"{what} is {value!r}, expected a list of numbers")
    return tuple(_count(number, what) for number in value)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _damaged(f"{what} is {type(value).__name__}, expected an object")
    return value


def _field(document: Mapping[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if type(value) is not kind:
        raise _damaged(f"{key} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _damaged(what: str, tensor: str | None = None) -> DamagedError:
    return DamagedError(what, file=MANIFEST, tensor=tensor)
