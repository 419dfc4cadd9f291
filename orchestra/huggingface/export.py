"""Writes a committed checkpoint's model as a Hugging Face Llama folder, one chunk after the other.

Memory holds a few chunks, whatever the size of the model. The folder appears under its name when it is whole
and on disk, or not at all. Optimizer state stays behind. It knows no runs: only storage, manifest and model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.format.boxes import Box
from checkpointing.format.dtypes import ITEM_BYTES
from checkpointing.format.manifest import Manifest
from checkpointing.storage import Storage
from conf.schema import ModelConfig
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.copying import copies_into, copy_chunk, write_at
from orchestra.huggingface.folder import CONFIG, INDEX
from orchestra.huggingface.llama_config import config_document
from orchestra.huggingface.parameters import CHECKPOINT_PREFIX, hugging_face_name, parameter_shapes
from orchestra.huggingface.rounding import STORED
from orchestra.huggingface.shard_plan import PlannedFile, index_document, plan_files
from orchestra.units import MIB

# Chunks in memory at once; each is at most a few tens of MiB, and twice that while its numbers are rounded.
_NUM_THREADS = 4
# What most published models have; 50 GB, transformers' own since version 5, is more than S3 takes in one put.
DEFAULT_MAX_FILE_BYTES = 5 * 10**9
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Wanted:
    """What to write: where to, numbers of which type (safetensors' name), and the largest file.

    `end_of_text` is the token that ends a document, None where that is not known.
    """

    target: Path
    dtype: str = "F32"
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    end_of_text: int | None = None


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes: the safetensors files, and the JSON files by name."""

    wanted: Wanted
    files: Sequence[PlannedFile]
    texts: Mapping[str, Any]
    num_parameters: int

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return sorted([*self.texts, *(file.name for file in self.files)])

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
    """Raise DataError unless the checkpoint holds each parameter of the model with its shape and a type that
    can be exported.
    """
    for name, shape in parameter_shapes(model).items():
        tensor = manifest.tensors.get(CHECKPOINT_PREFIX + name)
        if tensor is None:
            raise DataError(f"the checkpoint has no tensor {CHECKPOINT_PREFIX}{name}, which the model has")
        if tensor.shape != shape:
            raise DataError(
                f"{CHECKPOINT_PREFIX}{name} has shape {list(tensor.shape)}, the run's model has {list(shape)}"
            )
        if tensor.dtype not in STORED:
            raise DataError(f"{CHECKPOINT_PREFIX}{name} is {tensor.dtype}, expected {', '.join(STORED)}")


def plan_export(manifest: Manifest, model: ModelConfig, wanted: Wanted) -> ExportPlan:
    """Return what is to be written for a checkpoint's model; reads no tensor and writes nothing.

    Raises DataError where the model has no such form or the checkpoint holds another model.
    """
    document = config_document(model, wanted.dtype, wanted.end_of_text)
    check_fits(manifest, model)
    shapes = {hugging_face_name(name): shape for name, shape in parameter_shapes(model).items()}
    num_parameters = sum(Box.whole(shape).num_elements for shape in shapes.values())
    files = plan_files(shapes, wanted.dtype, wanted.max_file_bytes)
    texts: dict[str, Any] = {CONFIG: document, _GENERATION_CONFIG: {"eos_token_id": wanted.end_of_text}}
    if len(files) > 1:
        texts[INDEX] = index_document(files, num_parameters * ITEM_BYTES[wanted.dtype], num_parameters)
    return ExportPlan(wanted, files, texts, num_parameters)


def write_export(storage: Storage, manifest: Manifest, plan: ExportPlan) -> None:
    """Write what was planned, verifying each chunk of the checkpoint.

    Raises DamagedError where a chunk is not what the manifest says, DataError where a number leaves the range
    of the new type, ConfigError where the target is taken or does not have the room. After an error nothing
    is left behind.
    """
    target = plan.wanted.target
    refuse_target(target)
    with _draft(target) as draft:
        _refuse_small_disk(draft, plan.num_bytes)
        for file in plan.files:
            _write_file(draft / file.name, file, storage, manifest, plan.wanted.dtype)
        for name, content in plan.texts.items():
            _write_text(draft / name, content)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Give a folder beside the target that takes its name in the end, and is removed after an error."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        _sync_folder(draft)
        _take_place(draft, target)
        _sync_folder(target.parent)
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
    figures = os.statvfs(folder)
    free = figures.f_bavail * figures.f_frsize
    if free < num_bytes:
        raise ConfigError(
            f"--to {folder.parent}: {num_bytes // MIB:,} MiB are needed and {free // MIB:,} MiB are free; "
            "choose another place, or --dtype bf16"
        )


def _write_text(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_file(path: Path, file: PlannedFile, storage: Storage, manifest: Manifest, dtype: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_at(descriptor, file.header, 0)
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            jobs = [
                threads.submit(copy_chunk, copy, storage, descriptor)
                for copy in copies_into(file, manifest, dtype)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
