"""`orchestra checkpoint import FOLDER`: how to start a run from Hugging Face weights. Reads headers only."""

from __future__ import annotations

import dataclasses
import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.text import figures
from orchestra.errors import EXIT_DONE

if TYPE_CHECKING:
    from orchestra.huggingface.folder import Folder

_TOKENIZER = "tokenizer.json"
_EXPLAINED = """\
FOLDER holds config.json and *.safetensors of a Llama, as `transformers` and `orchestra checkpoint export`
write them; a fsspec URL works too. Pickled weights (*.bin) are refused.
Nothing is copied: the run reads the weights from FOLDER when it starts (model.init_from).
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="config.json and *.safetensors of a Llama")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Check the folder, print the overrides that start from it, and return 0. Raises DataError."""
    from orchestra.huggingface.folder import open_folder, overrides_for

    folder = open_folder(arguments.folder)
    overrides = overrides_for(folder)
    if arguments.json:
        print(json.dumps(_record(folder, overrides), indent=2))
    else:
        _print(folder, overrides)
    return EXIT_DONE


def _record(folder: Folder, overrides: Sequence[str]) -> dict[str, Any]:
    model = dataclasses.asdict(folder.model)
    model["family"] = folder.model.family.name
    return {
        "folder": folder.place,
        "model": model,
        "num_parameters": folder.num_parameters,
        "num_tensors": len(folder.manifest.tensors),
        "num_bytes": folder.manifest.num_bytes,
        "files": sorted(folder.manifest.files),
        "dtypes": folder.dtypes,
        "tokenizer": tokenizer_file(folder),
        "overrides": list(overrides),
    }


def tokenizer_file(folder: Folder) -> str | None:
    """Return the path of the folder's tokenizer.json, None where it has none or is a URL."""
    file = Path(folder.place) / _TOKENIZER
    return str(file) if "://" not in folder.place and file.is_file() else None


def _print(folder: Folder, overrides: Sequence[str]) -> None:
    model, manifest = folder.model, folder.manifest
    print(folder.place)
    print(
        f"Llama: {model.num_hidden_layers} layers, hidden {model.hidden_size:,}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} key-value), "
        f"vocabulary {model.vocab_size:,}"
    )
    size = figures.quantity(float(manifest.num_bytes))
    types = ", ".join(folder.dtypes)
    print(f"{folder.num_parameters:,} parameters in {len(manifest.tensors)} tensors ({types})")
    print(f"{size}B in {figures.number_of(len(manifest.files), 'file')}")
    print("names, shapes and types of all tensors fit; the weights themselves were not read\n")
    tokenizer = tokenizer_file(folder)
    if tokenizer is not None:
        print("pack text with its tokenizer:")
        print(_command(["orchestra", "data", "pack", "TEXT", "--output", "tokens", "--tokenizer", tokenizer]))
        overrides = [*overrides, "data=tokens", "data.path=tokens"]
    print("start a run from it:")
    print(_command(["orchestra", "run", *overrides]))


def _command(words: Sequence[str]) -> str:
    """Return a shell command over as many lines as it needs; a word is never cut."""
    lines = [" "]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + 1 + len(word) + len(" \\") > figures.WIDTH and lines[-1].strip():
            lines.append("   ")
        lines[-1] += " " + word
    return " \\\n".join(lines)
