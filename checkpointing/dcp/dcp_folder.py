"""What a folder of torch.distributed.checkpoint holds, and its tensors, one part after the other.

DCP describes its folder by a pickle, `.metadata`, and a pickle runs whatever its writer wants. So this one is
read with an allow-list of DCP's own classes, of which not even one is made: records without behaviour stand
in for all of them. Tensors and values lie in files of torch.save, which `torch.load(weights_only=True)`
reads. What `HuggingFaceStorageWriter` writes (safetensors, and no pickle) is read as well.

This is the only exception to "no pickle" (tests/architecture/test_no_pickle.py).
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from checkpointing.box import ITEM_BYTES, Box, overlapping
from checkpointing.checkpoint_errors import CheckpointError, DamagedError
from checkpointing.shards import as_bytes, safetensors_dtype, torch_dtype
from checkpointing.storage import Storage

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_DTYPE = re.compile(r"u?int\d+|b?float\d+(_\w+)?|bool|complex\d+|q[u]?int\w+|bits\w+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# In the header of a file that HuggingFaceStorageWriter wrote.
_SHARDING = "DCP_SHARDING_INFO"
_MAX_HEADER_BYTES = 100_000_000
_LARGEST = 1 << 62
_MAX_DIMS = 32


class _Record:
    """Stands in for an object of DCP's: what it was made with, and what was to be its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Return what takes the place of each class and function that DCP's metadata may name."""

    def record(name: str) -> type[_Record]:
        return type(name, (_Record,), {})

    return {
        **{(f"{_DCP}.metadata", name): record(name) for name in _METADATA_CLASSES},
        (f"{_DCP}.filesystem", "_StorageInfo"): record("_StorageInfo"),
        # Where they were up to torch 2.2.
        (_SHARDED_TENSOR, "TensorProperties"): record("TensorProperties"),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): record("_MEM_FORMAT_ENCODING"),
        **{(module, name): record(name) for module in ("pathlib", "pathlib._local") for name in _PATHS},
        ("torch.serialization", "_get_layout"): record("layout"),
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): dict,
    }


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but records, tuples, dicts and names of dtypes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if (module, name) not in self._allowed:
            raise CheckpointError(
                f"{METADATA} asks for {module}.{name}, which is none of DCP's classes: nothing of it was "
                "executed; do not trust this folder"
            )
        return self._allowed[module, name]


@dataclass(frozen=True)
class DcpChunk:
    """One part of a tensor, and the bytes of a file that it was saved in."""

    box: Box
    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class DcpTensor:
    """A whole tensor; `dtype` is safetensors' name of it, torch's where that has none. Its chunks hold each
    element once.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class DcpFolder:
    """What a folder holds by DCP's names: tensors, and the places of everything else.

    `parents`: the dict that a name lay in, as a prefix (`model.` of `model.layers.0.weight`), where that is
    known; `paths`: the keys on the way to it, whole numbers those of lists.
    """

    storage: Storage
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpChunk] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    def chunk(self, name: str, chunk: DcpChunk) -> torch.Tensor:
        """Read one part of a tensor, contiguous, on the CPU. Raises DamagedError or StorageError."""
        tensor = self.tensors[name]
        if chunk.file.endswith(".safetensors"):
            part = torch.empty(chunk.box.shape, dtype=torch_dtype(tensor.dtype))
            self.storage.read_into(chunk.file, chunk.begin, memoryview(cast(Any, as_bytes(part).numpy())))
            return part
        value = self._loaded(name, chunk)
        found = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            if (value.dtype, value.shape) == (torch_dtype(tensor.dtype), chunk.box.shape):
                return value.contiguous()
            found = f"{value.dtype} {list(value.shape)}"
        expected = f"{torch_dtype(tensor.dtype)} {list(chunk.box.shape)} by {METADATA}"
        raise DamagedError(f"found {found}, expected {expected}", file=chunk.file, tensor=name)

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor, contiguous, on the CPU. Raises DamagedError or StorageError."""
        tensor = self.tensors[name]
        whole = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        for chunk in tensor.chunks:
            whole[chunk.box.within(Box.whole(tensor.shape))] = self.chunk(name, chunk)
        return whole

    def value(self, name: str) -> Any:
        """Read what is no tensor. Raises DamagedError or StorageError."""
        return self._loaded(name, self.values[name])

    def _loaded(self, name: str, place: DcpChunk) -> Any:
        # Filled in place: torch.load makes copies enough.
        stream = io.BytesIO()
        stream.seek(place.num_bytes - 1)
        stream.write(b"\0")
        with stream.getbuffer() as buffer:
            self.storage.read_into(place.file, place.begin, buffer)
        stream.seek(0)
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:
            # torch's own words advise to execute it.
            what = (
                f"its bytes from {place.begin} on are damaged, or more than tensors and plain values: "
                "torch.load(weights_only=True) refuses them"
            )
            raise DamagedError(what, file=place.file, tensor=name) from error


def open_dcp(storage: Storage) -> DcpFolder:
    """Read what a folder holds, and check that its files have all of it; no tensor is read.

    Raises CheckpointError with what was found and what is expected, DamagedError with the file.
    """
    names = storage.names()
    if not names:
        raise CheckpointError(f"{storage.place}: is not there or empty; give a folder with {METADATA} in it")
    sizes = storage.sizes("")
    if METADATA in sizes:
        folder = _of_metadata(storage, _metadata(storage.get(METADATA)))
    elif any(name.endswith(".safetensors") for name in sizes):
        folder = _of_safetensors(storage, sizes)
    else:
        steps = [name for name in names if "step" in name and storage.size(f"{name}/{METADATA}") is not None]
        advice = f"; give the folder of one step, such as {storage.place}/{steps[-1]}" if steps else ""
        raise CheckpointError(
            f"{storage.place}: has no file {METADATA}, so it is no checkpoint of torch.distributed.checkpoint"
            f", or was not finished{advice}"
        )
    _check_ranges(folder, sizes)
    return folder


def _metadata(content: bytes) -> _Record:
    try:
        metadata = _MetadataUnpickler(content).load()
    except CheckpointError:
        raise
    except Exception as error:
        # Bytes that are no pickle fail in many ways.
        what = f"cut off, damaged, or no metadata of DCP's ({type(error).__name__}: {error})"
        raise DamagedError(what, file=METADATA) from error
    if not isinstance(metadata, _Record) or type(metadata).__name__ != "Metadata":
        raise DamagedError(f"holds a {type(metadata).__name__}, expected DCP's Metadata", file=METADATA)
    return metadata


def _of_metadata(storage: Storage, metadata: _Record) -> DcpFolder:
    entries = _field(metadata, "state_dict_metadata", dict)
    places: dict[tuple[str, tuple[int, ...] | None], _Record] = {}
    for index, place in _field(metadata, "storage_data", dict).items():
        offset = _fields(index).get("offset")
        key = None if offset is None else _counts(offset, "an offset")
        places[_field(index, "fqn", str), key] = place
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, DcpChunk] = {}
    for name, entry in entries.items():
        kind = type(entry).__name__
        if type(name) is not str or kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
            raise DamagedError(f"{name!r} is a {kind}, expected a tensor or bytes", file=METADATA)
        if kind == "BytesStorageMetadata":
            values[name] = _place(name, Box((), ()), places.get((name, None)))
        else:
            tensors[name] = _tensor(name, entry, places)
    planned = _fields(metadata).get("planner_data")
    paths = {
        name: path
        for name, path in (planned.items() if isinstance(planned, dict) else ())
        if isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
    }
    parents = {name: _parent(name, path) for name, path in paths.items()}
    return DcpFolder(storage, tensors, values, parents, paths)


def _parent(name: Any, path: tuple[Any, ...]) -> str:
    outer = "".join(f"{key}." for key in path[:-1] if isinstance(key, str | int))
    return outer if isinstance(name, str) and name.startswith(outer) else ""


def _tensor(
    name: str, entry: _Record, places: Mapping[tuple[str, tuple[int, ...] | None], _Record]
) -> DcpTensor:
    properties = _fields(entry).get("properties")
    state = properties.state if isinstance(properties, _Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str):
        raise DamagedError("says no dtype", file=METADATA, tensor=name)
    shape = _counts(_fields(entry).get("size"), f"the size of {name}")
    chunks = []
    for chunk in _field(entry, "chunks", list):
        offsets = _counts(_fields(chunk).get("offsets"), f"the offsets of {name}")
        box = Box(offsets, _counts(_fields(chunk).get("sizes"), f"the sizes of {name}"))
        if len(box.offsets) != len(box.shape) or not box.is_inside(shape):
            raise DamagedError(f"a part lies outside of the shape {list(shape)}", file=METADATA, tensor=name)
        if box.num_elements:
            chunks.append(_place(name, box, places.get((name, offsets), places.get((name, None)))))
    return _whole(DcpTensor(safetensors_dtype(dtype) or f"torch.{dtype}", shape, tuple(chunks)), name)


def _whole(tensor: DcpTensor, name: str) -> DcpTensor:
    boxes = [chunk.box for chunk in tensor.chunks]
    num_held, num_expected = sum(box.num_elements for box in boxes), math.prod(tensor.shape)
    if num_held != num_expected or overlapping(boxes) is not None:
        raise DamagedError(
            f"its {len(boxes)} parts hold {num_held} of the {num_expected} elements of {list(tensor.shape)}, "
            "expected each once; a rank's part may be missing",
            tensor=name,
        )
    return tensor


def _of_safetensors(storage: Storage, sizes: Mapping[str, int]) -> DcpFolder:
    """Return what the files say that HuggingFaceStorageWriter wrote, each rank its own."""
    found: dict[str, list[DcpTensor]] = {}
    for file in sorted(name for name in sizes if name.endswith(".safetensors")):
        begin, header = _header(storage, file, sizes[file])
        about = _object(header.pop("__metadata__", None))
        if _SHARDING not in about:
            raise CheckpointError(
                f"{storage.place}/{file} is plain safetensors, not DCP's: with a config.json beside it, "
                "`orchestra checkpoint import FOLDER` takes it"
            )
        sharding = _object(_json(str(about[_SHARDING]), file))
        for name, value in header.items():
            entry, at = _object(value), _object(sharding.get(name)).get("saved_offsets")
            shape = _counts(entry.get("shape"), f"the shape of {name}", file)
            offsets = (0,) * len(shape) if at is None else _counts(at, f"saved_offsets of {name}", file)
            first, end = (*_counts(entry.get("data_offsets"), f"data_offsets of {name}", file), 0, 0)[:2]
            dtype = str(entry.get("dtype"))
            num_bytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
            if len(offsets) != len(shape) or end - first != num_bytes:
                raise DamagedError(f"{dtype} {list(shape)} does not fit its bytes", file=file, tensor=name)
            box = Box(offsets, shape)
            chunks = (DcpChunk(box, file, begin + first, num_bytes),) if num_bytes else ()
            found.setdefault(name, []).append(DcpTensor(dtype, box.ends, chunks))
    return DcpFolder(storage, {name: _joined(name, parts) for name, parts in found.items()})


def _joined(name: str, parts: Sequence[DcpTensor]) -> DcpTensor:
    """Return the tensor that the parts of all ranks make up: it ends where they do."""
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        raise DamagedError("its parts differ in dtype or number of dims", tensor=name)
    shape = tuple(map(max, zip(*(part.shape for part in parts), strict=True)))
    chunks = dict.fromkeys(chunk for part in parts for chunk in part.chunks)
    return _whole(DcpTensor(parts[0].dtype, shape, tuple(chunks)), name)


def _header(storage: Storage, file: str, size: int) -> tuple[int, dict[str, Any]]:
    """Return where a safetensors file's tensors begin, and its header."""
    length = bytearray(8)
    if size >= len(length):
        storage.read_into(file, 0, memoryview(length))
    num_bytes = int.from_bytes(length, "little")
    if size < len(length) or num_bytes > min(size - len(length), _MAX_HEADER_BYTES):
        raise DamagedError("is no safetensors file, or cut off; copy it again", file=file)
    content = bytearray(num_bytes)
    storage.read_into(file, len(length), memoryview(content))
    return len(length) + num_bytes, _object(_json(content.decode(errors="replace"), file))


def _json(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its header is not JSON: {error}", file=file) from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _place(name: str, box: Box, place: _Record | None) -> DcpChunk:
    if place is None:
        raise DamagedError(f"does not say where the part {box.label()} lies", file=METADATA, tensor=name)
    file = _field(place, "relative_path", str)
    if not _FILE_NAME.fullmatch(file):
        raise DamagedError(f"names the file {file!r}, expected one in the folder", file=METADATA, tensor=name)
    extensions = _fields(place).get("transform_descriptors")
    if extensions:
        raise CheckpointError(
            f"{name}: was written through the extensions {extensions}, which are not read here; save without"
        )
    begin, length = _counts((_fields(place).get("offset"), _fields(place).get("length")), f"{name}'s place")
    if length == 0:
        raise DamagedError("no bytes are said to hold it", file=METADATA, tensor=name)
    return DcpChunk(box, file, begin, length)


def _fields(record: Any) -> Mapping[Any, Any]:
    state = record.state if isinstance(record, _Record) else None
    return state if isinstance(state, dict) else {}


def _field(record: Any, key: str, kind: type) -> Any:
    value = _fields(record).get(key)
    if not isinstance(value, kind):
        raise DamagedError(
            f"{key} of {type(record).__name__} is {type(value).__name__}, expected {kind.__name__}",
            file=METADATA,
        )
    return value


def _counts(value: Any, what: str, file: str = METADATA) -> tuple[int, ...]:
    is_fine = isinstance(value, tuple | list) and len(value) <= _MAX_DIMS
    if not is_fine or any(type(number) is not int or not 0 <= number < _LARGEST for number in value):
        raise DamagedError(f"{what} is no short list of whole numbers", file=file)
    return tuple(value)


def _check_ranges(folder: DcpFolder, sizes: Mapping[str, int]) -> None:
    """Raise DamagedError where a file is missing or too short, or a range too small for its part."""
    parts = [(name, chunk, tensor) for name, tensor in folder.tensors.items() for chunk in tensor.chunks]
    for name, place, tensor in [*parts, *((name, place, None) for name, place in folder.values.items())]:
        size = sizes.get(place.file)
        if size is None:
            raise DamagedError("there is no such file; copy the whole folder", file=place.file, tensor=name)
        if place.begin + place.num_bytes > size:
            what = (
                f"cut off: it has {size} bytes, {place.begin + place.num_bytes} are expected; copy it again"
            )
            raise DamagedError(what, file=place.file, tensor=name)
        item_bytes = 1 if tensor is None else ITEM_BYTES.get(tensor.dtype, 1)
        if place.box.num_elements * item_bytes > place.num_bytes:
            what = f"{place.num_bytes} bytes cannot hold the part {place.box.label()}"
            raise DamagedError(what, file=place.file, tensor=name)
