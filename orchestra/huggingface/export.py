"""Writes a committed checkpoint's model as a Hugging Face folder, one chunk after the other.

Memory holds a few chunks, whatever the size of the model. The folder appears under its name when it is whole
and on disk, or not at all. Optimizer state is left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkpointing.box import ITEM_BYTES, Box
from checkpointing.catalog import step_name
from checkpointing.checkpoint_errors import DamagedError
from checkpointing.integrity import checksums
from checkpointing.integrity.checksums import Buffer
from checkpointing.manifest import Chunk, Manifest
from checkpointing.plans import Image, TensorPiece, grouped, image
from checkpointing.storage import Storage
from checkpointing.storage.local import LocalStorage, sync_folder
from conf.schema import ModelConfig, MoeBalance
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.config_json import DEEPSEEK_V3, MIXTRAL, architecture_of, config_document
from orchestra.huggingface.folder import CONFIG, INDEX, SINGLE_FILE
from orchestra.huggingface.hub_names import (
    CHECKPOINT_PREFIX,
    ROUTER_BIAS,
    StoredPart,
    bias_shapes,
    parameter_shapes,
    stored_parts,
)
from orchestra.sizes.units import MIB

# fp32, bf16 and fp16 numbers from one type to another, rounded to nearest, ties to even.
#
# numpy has no bfloat16: here it is 16 bits in a uint16.


Numbers: TypeAlias = npt.NDArray[Any]

# How each type lies in memory, little-endian as safetensors wants it.
STORED: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Our short names (conf.schema.DType) and safetensors' own.
SAFETENSORS_NAMES: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_QUIET_NAN_BIT = 0x0040
# Small enough for the cache: what is computed in between then costs neither time nor memory.
_NUMBERS_AT_ONCE = 1 << 16


def stored(content: Buffer, dtype: str) -> Numbers:
    """Return the numbers that `content` holds, flat and as they are stored (a view)."""
    return np.frombuffer(content, dtype=STORED[dtype])


def converted(numbers: Numbers, source: str, target: str) -> tuple[Numbers, int]:
    """Return stored numbers of type `source` as type `target`, and how many finite ones became infinite.

    Infinities and NaNs stay what they are; what is beyond the range of `target` becomes an infinity.
    """
    if source == target:
        return numbers, 0
    result: Numbers = np.empty(numbers.shape, dtype=STORED[target])
    num_overflowed = 0
    for first in range(0, len(numbers), _NUMBERS_AT_ONCE):
        part = slice(first, first + _NUMBERS_AT_ONCE)
        wide: Numbers = _widened(numbers[part]) if source == "BF16" else numbers[part]
        result[part] = _narrowed(wide, target)
        num_overflowed += _num_overflowed(wide, result[part], target)
    return result, num_overflowed


def _narrowed(wide: Numbers, target: str) -> Numbers:
    if target == "BF16":
        return _as_bfloat16(wide.astype("<f4", copy=False))
    with np.errstate(over="ignore", invalid="ignore"):
        return wide.astype(STORED[target])


def _num_overflowed(wide: Numbers, result: Numbers, target: str) -> int:
    is_infinite = np.isinf(_widened(result) if target == "BF16" else result)
    return int(np.count_nonzero(is_infinite & ~np.isinf(wide))) if is_infinite.any() else 0


def _widened(bits: Numbers) -> Numbers:
    return (bits.astype("<u4") << 16).view("<f4")


def _as_bfloat16(singles: Numbers) -> Numbers:
    """Round fp32 to its upper half: add just under half a unit, or half where the last bit kept is odd."""
    bits = singles.view("<u4")
    upper = bits >> 16
    rounded: Numbers = ((bits + (upper & 1) + 0x7FFF) >> 16).astype("<u2")
    # The addition would carry a NaN into infinity or zero.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if is_nan.any():
        rounded[is_nan] = upper[is_nan] | _QUIET_NAN_BIT
    return rounded


# Which tensor goes into which safetensors file: pure, from shapes to bytes of headers.

# So that the numbers after the header are aligned, as safetensors writes it.
_HEADER_ALIGNMENT = 8


def plan_files(parts: Sequence[StoredPart], dtype: str, max_file_bytes: int) -> list[Image]:
    """Share tensors out to files of at most `max_file_bytes` of numbers, in order, as transformers does.

    A tensor that is larger gets a file of its own: tensors are never cut. What experts are chosen by stays
    fp32.
    """
    tensors = [
        TensorPiece(
            part.name,
            Box.whole(part.shape),
            "F32" if part.parameter.endswith(ROUTER_BIAS) else dtype,
            part.shape,
        )
        for part in parts
    ]
    groups = list(grouped(tensors, lambda tensor: tensor.num_bytes, max_file_bytes))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    # transformers refuses files whose metadata do not say whose tensors these are.
    return [
        image(name, group, _HEADER_ALIGNMENT, {"format": "pt"})
        for name, group in zip(names if len(groups) > 1 else [SINGLE_FILE], groups, strict=True)
    ]


def index_document(files: Sequence[Image], total_bytes: int, num_parameters: int) -> dict[str, Any]:
    """Return model.safetensors.index.json for several files."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.pieces}
    metadata = {"total_size": total_bytes, "total_parameters": num_parameters}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


# One chunk of a checkpoint on its way into a safetensors file: read, verified, rounded, written.
#
# A chunk may be any box of its tensor; in the file the tensor lies as a whole, or, of stacked experts, each
# of them.


@dataclass(frozen=True)
class ChunkCopy:
    """A chunk of tensor `name` from the checkpoint in `folder`, its numbers from type `source` to type
    `target`, into a file in which boxes of the tensor begin at bytes.
    """

    name: str
    folder: str
    chunk: Chunk
    source: str
    target: str
    begins: Sequence[tuple[Box, int]]


def copies_into(
    file: Image, parts: Mapping[str, StoredPart], manifest: Manifest, folder: str
) -> Iterator[ChunkCopy]:
    """Yield what fills a planned file; `parts`: what each of its tensors is of ours, by their names."""
    wanted: dict[tuple[str, str], list[tuple[Box, int]]] = {}
    for target, begin in zip(file.pieces, file.begins, strict=True):
        part = parts[target.name]
        wanted.setdefault((part.parameter, target.dtype), []).append((part.box, begin))
    for (parameter, dtype), begins in wanted.items():
        name = CHECKPOINT_PREFIX + parameter
        tensor = manifest.tensors.get(name)
        # What the checkpoint does not have stays zero.
        for chunk in () if tensor is None else tensor.chunks:
            here = [(box, begin) for box, begin in begins if box.overlap(chunk.box) is not None]
            if here and tensor is not None:
                yield ChunkCopy(name, folder, chunk, tensor.dtype, dtype, here)


def copy_chunk(copy: ChunkCopy, storage: Storage, descriptor: int) -> None:
    """Read, verify, round and write one chunk.

    Raises DamagedError where its bytes are not the manifest's, DataError where numbers leave the range of the
    new type, StorageError, OSError.
    """
    chunk = copy.chunk
    content = bytearray(chunk.num_bytes)
    storage.read_into(f"{copy.folder}/{chunk.file}", chunk.begin, memoryview(content))
    checksum = checksums.of_chunk(content)
    if checksum != chunk.checksum:
        what = f"the bytes from {chunk.begin} on have checksum {checksum}, the manifest says {chunk.checksum}"
        raise DamagedError(what, file=chunk.file, tensor=copy.name)
    numbers, num_overflowed = converted(stored(content, copy.source), copy.source, copy.target)
    if num_overflowed:
        raise DataError(
            f"{copy.name}: {num_overflowed} of its numbers are beyond the range of {copy.target}; "
            "export with --dtype bf16 or fp32"
        )
    in_chunk = numbers.reshape(chunk.box.shape)
    for whole, begin in copy.begins:
        box = whole.overlap(chunk.box)
        assert box is not None
        its = in_chunk[box.within(chunk.box)]
        offsets = tuple(mine - outer for mine, outer in zip(box.offsets, whole.offsets, strict=True))
        for index, first in runs(Box(offsets, box.shape), whole.shape):
            write_at(descriptor, its[index].tobytes(), begin + first * ITEM_BYTES[copy.target])


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the parts of a box that lie side by side in the whole row-major tensor of `shape`: the index of
    each in the box, and the flat index in the tensor of its first element.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(map(int.__mul__, box.offsets, strides))
    num_outer = len(shape)
    while num_outer > 0 and box.shape[num_outer - 1] == shape[num_outer - 1]:
        num_outer -= 1
    # The dims from `num_outer` on are whole; the one before is a stretch of them.
    num_outer = max(0, num_outer - 1)
    for index in np.ndindex(*box.shape[:num_outer]):
        yield index, first + sum(map(int.__mul__, index, strides))


def write_at(descriptor: int, content: bytes | memoryview, begin: int) -> None:
    """Write all of `content` from byte `begin` of a file on."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], begin + done)


# Chunks in memory at once; each is at most a few tens of MiB, and twice that while its numbers are rounded.
_NUM_THREADS = 4
# What most published models have; 50 GB, transformers' own since version 5, is more than S3 takes in one put.
DEFAULT_MAX_FILE_BYTES = 5 * 10**9
TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ExportRequest:
    """What to write: where to, numbers of which type (safetensors' name), and the largest file.

    `end_of_text` is the token that ends a document, None where that is not known; `tokenizer` the file that
    is copied beside the weights, if any, and `separator` what that calls the token.
    """

    target: Path
    dtype: str = "F32"
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    end_of_text: int | None = None
    tokenizer: Path | None = None
    separator: str | None = None


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes: the safetensors files, what each tensor in them is of ours, and the JSON files
    by name.
    """

    wanted: ExportRequest
    files: Sequence[Image]
    parts: Mapping[str, StoredPart]
    texts: Mapping[str, Any]
    num_parameters: int

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        tokenizer = [] if self.wanted.tokenizer is None else [TOKENIZER]
        return sorted([*self.texts, *tokenizer, *(file.name for file in self.files)])

    @property
    def num_bytes(self) -> int:
        """Bytes of the safetensors files."""
        return sum(file.num_bytes for file in self.files)


def refuse_target(target: Path) -> None:
    """Raise ConfigError unless `target` can become a new folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise ConfigError(f"--to {target}: exists already and is not an empty folder; choose another name")


def check_fits(manifest: Manifest, model: ModelConfig) -> None:
    """Raise DataError unless the checkpoint holds each parameter of the model, and each bias of a router,
    with its shape and a type that can be exported.
    """
    for name, shape in {**parameter_shapes(model), **bias_shapes(model)}.items():
        tensor = manifest.tensors.get(CHECKPOINT_PREFIX + name)
        if tensor is None:
            raise DataError(f"the checkpoint has no tensor {CHECKPOINT_PREFIX}{name}, which the model has")
        if tensor.shape != shape:
            raise DataError(
                f"{CHECKPOINT_PREFIX}{name} has shape {list(tensor.shape)}, the run's model has {list(shape)}"
            )
        if tensor.dtype not in STORED:
            raise DataError(f"{CHECKPOINT_PREFIX}{name} is {tensor.dtype}, expected {', '.join(STORED)}")


def plan_export(manifest: Manifest, model: ModelConfig, wanted: ExportRequest) -> ExportPlan:
    """Return what is to be written for a checkpoint's model; reads no tensor and writes nothing.

    Raises DataError where the model has no such form or the checkpoint holds another model.
    """
    document = config_document(model, wanted.dtype, wanted.end_of_text)
    check_fits(manifest, model)
    kind = architecture_of(model)
    # DeepSeek-V3 has a bias for each expert, whatever kept ours even.
    named = replace(model, moe_balance=MoeBalance.bias) if kind is DEEPSEEK_V3 else model
    parts = list(stored_parts(named, is_mixtral=kind is MIXTRAL))
    files = plan_files(parts, wanted.dtype, wanted.max_file_bytes)
    num_parameters = sum(Box.whole(shape).num_elements for shape in parameter_shapes(model).values())
    texts: dict[str, Any] = {CONFIG: document, _GENERATION_CONFIG: {"eos_token_id": wanted.end_of_text}}
    if wanted.tokenizer is not None:
        texts[_TOKENIZER_CONFIG] = _tokenizer_document(wanted.separator)
    if len(files) > 1:
        num_bytes = sum(tensor.num_bytes for file in files for tensor in file.pieces)
        texts[INDEX] = index_document(files, num_bytes, num_parameters)
    return ExportPlan(wanted, files, {part.name: part for part in parts}, texts, num_parameters)


def _tokenizer_document(separator: str | None) -> dict[str, Any]:
    """Return tokenizer_config.json, by which transformers takes the file as it is. By itself it takes the
    class of the model's architecture, and Qwen's puts its own rules of splitting in the place of the file's.
    """
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return document if separator is None else {**document, "eos_token": separator}


def write_export(storage: Storage, manifest: Manifest, plan: ExportPlan, folder: str | None = None) -> None:
    """Write what was planned, verifying each chunk of the checkpoint (in `folder`; None: that of its step).

    Raises DamagedError where a chunk is not what the manifest says, DataError where a number leaves the range
    of the new type, ConfigError where the target is taken or does not have the room, StorageError or OSError
    where it cannot be written. After an error nothing remains.
    """
    target = plan.wanted.target
    refuse_target(target)
    with _draft(target) as draft:
        _refuse_small_disk(draft, plan.num_bytes)
        for file in plan.files:
            copies = copies_into(file, plan.parts, manifest, folder or step_name(manifest.step))
            _write_file(draft / file.name, file, copies, storage)
        for name, content in plan.texts.items():
            LocalStorage(draft).put(name, f"{json.dumps(content, indent=2)}\n".encode())
        if plan.wanted.tokenizer is not None:
            LocalStorage(draft).put(TOKENIZER, plan.wanted.tokenizer.read_bytes())


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Give a folder beside the target that takes its name in the end, and is removed after an error."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--to {target}: cannot be written ({error.strerror or error}); choose another place"
        ) from error
    try:
        yield draft
        sync_folder(draft)
        _take_place(draft, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _take_place(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ConfigError(
                f"--to {target}: was made by somebody else meanwhile; choose another name"
            ) from error
        raise


def _refuse_small_disk(folder: Path, num_bytes: int) -> None:
    free = LocalStorage(folder).free_bytes()
    if free < num_bytes:
        raise ConfigError(
            f"--to {folder.parent}: {num_bytes // MIB:,} MiB are needed and {free // MIB:,} MiB are free; "
            "choose another place, or --dtype bf16"
        )


def _write_file(path: Path, file: Image, copies: Iterable[ChunkCopy], storage: Storage) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(descriptor, file.header, 0)
        os.ftruncate(descriptor, file.num_bytes)
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            jobs = [threads.submit(copy_chunk, copy, storage, descriptor) for copy in copies]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
