"""A folder of Hugging Face weights as something to restore from: its model, and a manifest of its tensors.

It reads config.json, the index and the headers of all files, and no weights. The folder may be a fsspec URL.
There are no checksums in such a folder, so its chunks have none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from checkpointing.box import ITEM_BYTES, Box
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Chunk, File, Manifest, Tensor
from checkpointing.storage import Storage, open_storage
from conf.schema import Config, ModelConfig, MoeBalance
from orchestra.errors import DataError
from orchestra.huggingface.config_json import MIXTRAL, architecture_of, groups_that_count, model_of
from orchestra.huggingface.hub_names import (
    CHECKPOINT_PREFIX,
    GATE_AND_UP,
    OUTPUT,
    ROUTER_BIAS,
    StoredPart,
    bias_shapes,
    is_superfluous,
    parameter_shapes,
    stored_parts,
)
from orchestra.run.paths import RunDir
from orchestra.sizes.flops import attention_width, expert_width
from orchestra.sizes.units import first_few

# Headers of safetensors files: which tensors a file holds, of what type and shape, and where. No tensors.
#
# A header comes from strangers and decides which bytes are taken for what, so every number in it is checked.


_LENGTH_BYTES = 8
# The limit of safetensors itself.
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_MAX_DIMS = 32
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Header:
    """A file's size and its tensors by name, each one chunk of the file."""

    num_bytes: int
    tensors: dict[str, Tensor]


def read_header(storage: Storage, folder: str, file: str) -> Header:
    """Read the header of a file in `folder`.

    Raises DataError where it is no whole safetensors file, StorageError where it cannot be read.
    """
    path = f"{folder}/{file}" if folder else file
    place = f"{storage.place}/{path}"
    size = storage.size(path)
    if size is None:
        raise DataError(f"{place}: there is no such file; copy the folder again")
    if size < _LENGTH_BYTES:
        raise DataError(f"{place}: {size} bytes are no safetensors file; copy it again")
    length = int.from_bytes(_read(storage, path, 0, _LENGTH_BYTES), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise DataError(
            f"{place}: not a safetensors file, or cut off: a header of {length} bytes in a file of {size}"
        )
    try:
        document = json.loads(_read(storage, path, _LENGTH_BYTES, length))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: its header is not JSON ({error}); this is no safetensors file") from error
    if not isinstance(document, dict):
        raise DataError(f"{place}: its header is {type(document).__name__}, expected an object")
    document.pop(_METADATA, None)
    data_begin = _LENGTH_BYTES + length
    tensors = {name: _described(value, name, file, data_begin, place) for name, value in document.items()}
    _refuse_gaps(tensors, data_begin, size, place)
    return Header(size, tensors)


def _read(storage: Storage, path: str, begin: int, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    storage.read_into(path, begin, memoryview(content))
    return content


def _described(value: Any, name: str, file: str, data_begin: int, place: str) -> Tensor:
    document = value if isinstance(value, dict) else {}
    dtype = document.get("dtype")
    shape, offsets = _counts(document.get("shape")), _counts(document.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DataError(f"{place}: {name}: dtype is {dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise DataError(f"{place}: {name}: its shape or its data_offsets are no lists of whole numbers")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise DataError(f"{place}: {name}: {num_bytes} bytes are not the size of {dtype} {list(shape)}")
    return _tensor(file, dtype, shape, data_begin + offsets[0])


def _tensor(file: str, dtype: str, shape: tuple[int, ...], begin: int) -> Tensor:
    """Return a tensor that lies as a whole, and without a checksum, from byte `begin` of a file on."""
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    return Tensor(dtype, shape, "", (Chunk(Box.whole(shape), file, begin, num_bytes, ""),))


def _counts(value: Any) -> tuple[int, ...] | None:
    """Return a short list of whole numbers from 0 on; None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return None
    return tuple(value) if all(type(number) is int and 0 <= number < _LARGEST for number in value) else None


def _refuse_gaps(tensors: dict[str, Tensor], data_begin: int, size: int, place: str) -> None:
    """The tensors of a safetensors file lie side by side and fill it, so what is cut off or doubled shows."""
    end = data_begin
    chunks = [(tensor.chunks[0], name) for name, tensor in tensors.items()]
    for chunk, name in sorted(chunks, key=lambda entry: (entry[0].begin, entry[0].num_bytes)):
        if chunk.begin != end:
            raise DataError(
                f"{place}: {name} begins at byte {chunk.begin}, the tensor before it ends at {end}"
            )
        end = chunk.end
    if end != size:
        what = "cut off" if end > size else "followed by other bytes"
        raise DataError(f"{place}: {what}: its tensors end at byte {end}, the file has {size}; copy it again")


CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Types whose every number fp32 holds, and fp64, which is rounded.
FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NUM_LISTED = 4
_WANTED = f"give a folder with {CONFIG} and *.safetensors in it"
_ABSENT = "{} is not there or empty; " + _WANTED
_PARAMETERS_PER_LAYER = 9


@dataclass(frozen=True)
class Folder:
    """What was found: the model, and a manifest in the names of a checkpoint (`model.<parameter>`).

    The files lie in `name` of `storage`, which is the place above the folder, as those of a checkpoint do.
    """

    place: str
    storage: Storage
    name: str
    model: ModelConfig
    manifest: Manifest
    # Whether it has an output matrix that nobody reads, since config.json ties it to the embeddings.
    has_second_output: bool = False

    @property
    def dtypes(self) -> list[str]:
        """safetensors' names of the types of its tensors."""
        return sorted({tensor.dtype for tensor in self.manifest.tensors.values()})

    @property
    def num_parameters(self) -> int:
        shapes = {name: tensor.shape for name, tensor in self.manifest.tensors.items()}
        return sum(
            Box.whole(shape).num_elements for name, shape in shapes.items() if not name.endswith(ROUTER_BIAS)
        )


def open_folder(place: str) -> Folder:
    """Read what a folder (a path or a fsspec URL) holds and check that it is one whole model. No weights.

    Raises DataError naming the file and the tensor: no such folder, pickled weights only, another
    architecture, tensors that are missing, superfluous, of another shape or of no floating-point type.
    """
    place, parent, name = _parted(place)
    if not _is_folder(parent, name):
        raise DataError(f"{place}: expected a folder with config.json and *.safetensors in it")
    try:
        return _opened(place, open_storage(parent), name)
    except CheckpointError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error


def absence(place: str) -> str | None:
    """Return that nothing lies at a place, as a sentence; None where something does, or where that cannot be
    seen: `open_folder` tells why.
    """
    place, parent, name = _parted(place)
    if "://" not in place and os.path.isfile(place):  # noqa: PTH113  text, not files
        return f"{place} is a file; {_WANTED}"
    with contextlib.suppress(CheckpointError):
        if _is_folder(parent, name) and not open_storage(parent).names(name):
            return _ABSENT.format(place)
    return None


def _parted(place: str) -> tuple[str, str, str]:
    """Return a folder's place as a whole, the place above it, and its name."""
    if "://" not in place:
        place = os.path.abspath(os.path.expanduser(place))  # noqa: PTH100,PTH111  text, not files
    parent, _, name = place.rstrip("/").rpartition("/")
    return place, parent or "/", name


def _is_folder(parent: str, name: str) -> bool:
    """Whether it is more than the root of a file system, or a bucket."""
    return bool(name) and not parent.endswith(":/")


def _opened(place: str, storage: Storage, name: str) -> Folder:
    present = storage.names(name)
    if not present:
        raise DataError(_ABSENT.format(place))
    if CONFIG not in present:
        raise DataError(f"{place} has no {CONFIG}; {_of_a_run(place) or _WANTED}")
    document = _json(storage, f"{name}/{CONFIG}", f"{place}/{CONFIG}")
    model = model_of(document, f"{place}/{CONFIG}", name)
    headers = {file: read_header(storage, name, file) for file in _files(storage, name, present)}
    stored = _tensors(headers, place)
    tensors = _taken(stored, _checked(stored, model, place), model, place)
    sizes = {file: header.num_bytes for file, header in headers.items()}
    second = model.tie_word_embeddings and OUTPUT in stored
    return Folder(place, storage, name, model, _manifest(sizes, tensors), has_second_output=second)


def _of_a_run(place: str) -> str | None:
    """Return how to get such a folder from a run, where a run or what lies in one was given."""
    path = Path(place)
    run = next((each for each in (path, *path.parents[:2]) if RunDir(each).config.exists()), None)
    if "://" in place or run is None:
        return None
    return (
        f"it is a run's: `orchestra checkpoint export {run} --to FOLDER` writes its weights as such a folder"
    )


def _json(storage: Storage, path: str, place: str) -> Any:
    try:
        return json.loads(storage.get(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error


def _files(storage: Storage, name: str, present: list[str]) -> list[str]:
    """Return the files that hold the weights: the one file, else what the index lists."""
    place = f"{storage.place}/{name}"
    if SINGLE_FILE in present:
        # As transformers does, which leaves the index of an earlier save where a model became one file.
        return [SINGLE_FILE]
    if INDEX in present:
        document = _json(storage, f"{name}/{INDEX}", f"{place}/{INDEX}")
        mapping = document.get("weight_map") if isinstance(document, dict) else None
        files = sorted({str(file) for file in mapping.values()}) if isinstance(mapping, dict) else []
        strange = [file for file in files if "/" in file or not file.endswith(".safetensors")]
        if not files or strange:
            found = f"names {strange[0]!r}" if strange else "has no weight_map"
            raise DataError(f"{place}/{INDEX}: {found}, expected names of *.safetensors beside it")
        return files
    files = [file for file in present if file.endswith(".safetensors")]
    if len(files) > 1:
        raise DataError(f"{place}: {len(files)} *.safetensors and no {INDEX}; copy the folder again, with it")
    if not files:
        raise DataError(_no_weights(place, present))
    return files


def _no_weights(place: str, present: list[str]) -> str:
    pickles = [file for file in present if file.endswith(_PICKLES)]
    if not pickles:
        return f"{place}: no *.safetensors in it; copy the weights too"
    return (
        f"{place}: the weights are pickles ({first_few(pickles, _NUM_LISTED)}), which can run any code when "
        "read; orchestra reads *.safetensors only: save the model again with transformers' save_pretrained"
    )


def _tensors(headers: dict[str, Header], place: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise DataError(f"{place}: {name} is in {tensors[name].chunks[0].file} and in {file}")
            tensors[name] = tensor
    return tensors


def _checked(tensors: dict[str, Tensor], model: ModelConfig, place: str) -> list[StoredPart]:
    """Return what the tensors hold of the model; raise DataError unless they are all of it and no more."""
    # Before names are made for each: the numbers are a stranger's.
    if model.num_hidden_layers * _PARAMETERS_PER_LAYER > len(tensors):
        raise DataError(
            f"{place}: {len(tensors)} tensors are too few for "
            f"num_hidden_layers={model.num_hidden_layers} of {CONFIG}"
        )
    is_stacked = any(name.endswith(GATE_AND_UP) for name in tensors)
    mixtures = model.num_hidden_layers - model.first_k_dense_replace if model.num_experts else 0
    if not is_stacked and mixtures * model.num_experts > len(tensors):
        raise DataError(
            f"{place}: {len(tensors)} tensors are too few for {model.num_experts} experts of {CONFIG}"
        )
    kind = architecture_of(model)
    parts = list(stored_parts(model, is_mixtral=kind is MIXTRAL, is_stacked=is_stacked))
    expected = {part.name: part.shape for part in parts}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise DataError(f"{place}: tensors are missing: {first_few(missing, _NUM_LISTED)}")
    strange = [name for name in tensors if name not in expected and not is_superfluous(name, model)]
    if strange:
        listed = first_few(strange, _NUM_LISTED)
        raise DataError(f"{place}: tensors that this {kind.title} does not have: {listed}")
    for name, shape in expected.items():
        tensor = tensors[name]
        where = f"{place}/{tensor.chunks[0].file}: {name}"
        if tensor.shape != shape:
            raise DataError(f"{where} has shape {list(tensor.shape)}, by {CONFIG} it is {list(shape)}")
        if tensor.dtype not in FLOAT_TYPES:
            raise DataError(f"{where} is {tensor.dtype}, expected {', '.join(FLOAT_TYPES)}")
    return parts


def _taken(
    stored: Mapping[str, Tensor], parts: Iterable[StoredPart], model: ModelConfig, place: str
) -> dict[str, Tensor]:
    """Return our tensors, each with the chunks of those that hold it. Raises DataError where their types
    differ.
    """
    chunks: dict[str, list[Chunk]] = {}
    types: dict[str, str] = {}
    for part in parts:
        whole = stored[part.name]
        (chunk,) = whole.chunks
        item = ITEM_BYTES[whole.dtype]
        begin, num_bytes = chunk.begin + part.begin * item, part.box.num_elements * item
        chunks.setdefault(part.parameter, []).append(Chunk(part.box, chunk.file, begin, num_bytes, ""))
        if types.setdefault(part.parameter, whole.dtype) != whole.dtype:
            raise DataError(
                f"{place}/{chunk.file}: {part.name} is {whole.dtype}, other experts of its layer are "
                f"{types[part.parameter]}; save the model in one type"
            )
    shapes = {**parameter_shapes(model), **bias_shapes(model)}
    return {
        CHECKPOINT_PREFIX + name: Tensor(types[name], shapes[name], "", tuple(its))
        for name, its in chunks.items()
    }


def _manifest(sizes: Mapping[str, int], tensors: Mapping[str, Tensor]) -> Manifest:
    files = {file: File(num_bytes, checksum="") for file, num_bytes in sizes.items()}
    return Manifest(step=0, generation=0, created=0.0, layout={}, tensors=tensors, files=files, state={})


def to_json(folder: Folder) -> dict[str, Any]:
    """Return where the weights lie as JSON, so that one rank reads the headers for all."""
    tensors = {
        name: [tensor.dtype, tensor.shape, [_chunk_to_json(chunk) for chunk in tensor.chunks]]
        for name, tensor in folder.manifest.tensors.items()
    }
    files = {name: file.num_bytes for name, file in folder.manifest.files.items()}
    return {"place": folder.place, "files": files, "tensors": tensors}


def _chunk_to_json(chunk: Chunk) -> list[Any]:
    return [chunk.box.offsets, chunk.box.shape, chunk.file, chunk.begin]


def from_json(value: Mapping[str, Any]) -> tuple[Storage, str, Manifest]:
    """Return storage, folder and manifest of what `to_json` gave."""
    tensors = {}
    for name, (dtype, shape, chunks) in value["tensors"].items():
        boxes = [(Box(tuple(offsets), tuple(its)), file, begin) for offsets, its, file, begin in chunks]
        made = (
            Chunk(box, file, begin, box.num_elements * ITEM_BYTES[dtype], "") for box, file, begin in boxes
        )
        tensors[name] = Tensor(dtype, tuple(shape), "", tuple(made))
    _, parent, name = _parted(value["place"])
    return open_storage(parent), name, _manifest(value["files"], tensors)


# Whether a folder's weights fit a configured model, and which overrides make a model that they fit. Whatever
# changes a parameter's shape or what the weights mean must agree; how long the training context is and how
# fresh weights would be made may differ.

# In the order in which people say them.
_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "norm_eps",
    "tie_word_embeddings",
    "qk_norm",
    "kv_lora_rank",
    "num_experts",
)
# Of latent attention, and of experts, where the weights are of a model that has them.
_LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_KEYS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Agreement that is not asked for, but is worth saying where a new run is made.
_OTHER_KEYS = ("max_position_embeddings", "moe_balance")
# What Hydra reads without quotes.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")


def init_from_problems(config: Config) -> Iterator[str]:
    """Yield what keeps a run from starting with the weights of `model.init_from`; nothing where it is null.

    Reads config.json and the headers of the files, no weights.
    """
    place = config.model.init_from
    if place is None or not place.strip():
        return
    try:
        folder = open_folder(place)
    except DataError as error:
        yield f"model.init_from: {error}"
        return
    yield from problems_of_folder(config.model, folder)


def problems_of_folder(model: ModelConfig, folder: Folder) -> Iterator[str]:
    """Yield what keeps a model from starting with a folder's weights, and the overrides that would help."""
    different = differences(model, folder.model)
    if different:
        listed = ", ".join(f"{key}={shown(other)} (configured {shown(own)})" for key, own, other in different)
        overrides = " ".join(f"{key}={shown(other)}" for key, _, other in different)
        yield (
            f"model.init_from={folder.place}: its weights are of another model: {listed}; add {overrides}, "
            f"or change {CONFIG} in a copy of the folder where that is what you mean"
        )


def differences(own: ModelConfig, other: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, own value, other value) for whatever must agree between a model and given weights."""
    keys = (
        "family",
        *_KEYS,
        *(_LATENT_KEYS if other.kv_lora_rank is not None else ()),
        *(_EXPERT_KEYS if other.num_experts else ()),
        # Weights with a bias for each expert are another model without it.
        *(("moe_balance",) if other.num_experts and other.moe_balance is MoeBalance.bias else ()),
    )
    different = [
        (f"model.{key}", getattr(own, key), getattr(other, key))
        for key in keys
        if not _is_same(own, other, key)
    ]
    scaling, other_scaling = own.rope_scaling, other.rope_scaling
    for key in ("enabled", *(_SCALING_KEYS if other_scaling.enabled else ())):
        if getattr(scaling, key) != getattr(other_scaling, key):
            value = getattr(scaling, key), getattr(other_scaling, key)
            different.append((f"model.rope_scaling.{key}", *value))
    return different


def _is_same(own: ModelConfig, other: ModelConfig, key: str) -> bool:
    """Whether a key says the same of both, or nothing that the weights of the other one depend on."""
    if getattr(own, key) == getattr(other, key):
        return True
    if key == "head_dim" and own.num_attention_heads:
        # A null that means the same number; where heads differ that is said by itself.
        return other.kv_lora_rank is not None or attention_width(own) == attention_width(other)
    if key in ("n_group", "topk_group"):
        return groups_that_count(own) == groups_that_count(other)
    if key == "moe_intermediate_size":
        return expert_width(own) == expert_width(other)
    if key == "intermediate_size" and other.num_experts and not other.first_k_dense_replace:
        return expert_width(own) == expert_width(other)
    return False


def overrides_for(folder: Folder) -> list[str]:
    """Return the overrides with which `orchestra run` starts from a folder, the default model given."""
    default = ModelConfig()
    overrides = [f"model.init_from={shown(folder.place)}"]
    if _PLAIN.fullmatch(folder.name):
        overrides.append(f"model.name={folder.name}")
    different = differences(default, folder.model)
    for key in _OTHER_KEYS:
        if getattr(folder.model, key) != getattr(default, key):
            different.append((f"model.{key}", None, getattr(folder.model, key)))
    return overrides + [f"{key}={shown(value)}" for key, _, value in different]


def shown(value: Any) -> str:
    """Return a value as Hydra reads it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
