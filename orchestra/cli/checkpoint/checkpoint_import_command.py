"""`orchestra checkpoint import FOLDER`: how to start a run from Hugging Face weights. Reads headers only.

With `--from dcp` it writes what a checkpoint of torch.distributed.checkpoint holds (`import_from_dcp`).
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.text import figures
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.sizes.flops import expert_width

if TYPE_CHECKING:
    from orchestra.huggingface.folder import Folder

_TOKENIZER = "tokenizer.json"
_HUGGING_FACE, _DCP = "hf", "dcp"
_EXPLAINED = """\
FOLDER holds config.json and *.safetensors of a Llama, Mixtral, Qwen3, Qwen3-MoE or DeepSeek-V3, as
`transformers` and `orchestra checkpoint export` write them; a fsspec URL works too. Pickled weights (*.bin)
are refused.
Nothing is copied: the run reads the weights from FOLDER when it starts (model.init_from).

  orchestra checkpoint import --from dcp FOLDER TARGET
  orchestra checkpoint import --from dcp FOLDER TARGET model=llama3_8b

--from dcp: FOLDER is that of one step of torch.distributed.checkpoint (FSDP2 loops, torchtitan). The first
form writes model and optimizer as a checkpoint at TARGET, which checkpointing.torch_state restores in a loop
of your own; the second writes the model as a Llama of Hugging Face to the folder TARGET, for model.init_from.
The names of torchtitan and Hugging Face are known. FOLDER's pickle is read with an allow-list: it executes
nothing.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="a model's; with --from dcp a checkpoint's")
    parser.add_argument(
        "rest", nargs="*", default=[], metavar="TARGET [model=…]", help="with --from dcp: what to write"
    )
    parser.add_argument(
        "--from", dest="source", choices=[_HUGGING_FACE, _DCP], default=_HUGGING_FACE, help="default: hf"
    )
    parser.add_argument("--step", type=int, metavar="N", help="dcp: where it does not say its step")
    parser.add_argument("--model", metavar="KEY", help="dcp: the key of the model's state dict in it")
    parser.add_argument("--model-only", action="store_true", help="dcp: leave the optimizer's state out")
    parser.add_argument(
        "--dry-run", action="store_true", help="dcp: say what would be written; write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Import and return 0. Raises ConfigError for the words, also where nothing lies at FOLDER, and DataError
    for what it holds.
    """
    from orchestra.huggingface.folder import absence, open_folder, overrides_for

    place = arguments.folder
    if arguments.source == _DCP:
        place = _imported(arguments)
        if place is None:
            return EXIT_DONE
    elif arguments.rest or any((arguments.step, arguments.model, arguments.model_only, arguments.dry_run)):
        raise ConfigError(
            "only --from dcp takes more than a FOLDER: a Hugging Face folder is read where it is"
        )
    if (missing := absence(place)) is not None:
        raise ConfigError(missing)
    folder = open_folder(place)
    overrides = overrides_for(folder)
    if arguments.json:
        print(json.dumps(_record(folder, overrides), indent=2))
    else:
        _print(folder, overrides)
    return EXIT_DONE


def _imported(arguments: Namespace) -> str | None:
    """Import from DCP; return the Hugging Face folder that was written, None where all is said."""
    from orchestra.cli.checkpoint.import_from_dcp import DcpSource, import_llama, import_loop, model_of

    target, *overrides = arguments.rest or [""]
    if not target or "=" in target:
        raise ConfigError("--from dcp needs a TARGET: orchestra checkpoint import --from dcp FOLDER TARGET")
    if arguments.step is not None and arguments.step < 0:
        raise ConfigError(f"--step {arguments.step}: expected 0 or more")
    if overrides:
        source = DcpSource(arguments.folder, arguments.model, step=arguments.step or 0)
        folder = import_llama(source, target, model_of(overrides), is_dry_run=arguments.dry_run)
        if not arguments.dry_run:
            return folder
        print(json.dumps({"folder": folder, "written": False}) if arguments.json else f"would write {folder}")
        return None
    record = import_loop(
        DcpSource(arguments.folder, arguments.model, arguments.step),
        target,
        model_only=arguments.model_only,
        is_dry_run=arguments.dry_run,
    )
    if arguments.json:
        print(json.dumps(record))
    else:
        _print_loop(record)
    return None


def _print_loop(record: dict[str, Any]) -> None:
    what = "model and optimizer" if record["has_optimizer"] else "the model alone"
    print(f"{'wrote' if record['written'] else 'would write'} {record['target']}")
    size = figures.quantity(float(record["num_bytes"]))
    print(f"step {record['step']}: {what}, {figures.number_of(record['num_tensors'], 'tensor')}, {size}B")
    if record["extra"]:
        print("\n".join(figures.wrapped(f"for `extra`: {', '.join(record['extra'])}")))
    if record["left_out"]:
        print("\n".join(figures.wrapped(f"left out, no JSON: {', '.join(record['left_out'])}")))
    print("\nrestore it in your own loop:")
    print("  from checkpointing.torch_state import restore")
    optimizer = ", optimizer" if record["has_optimizer"] else ""
    print(f"  step = restore({record['target']!r}, model{optimizer})")


def _record(folder: Folder, overrides: Sequence[str]) -> dict[str, Any]:
    model = dataclasses.asdict(folder.model)
    model |= {key: value.name for key, value in model.items() if isinstance(value, Enum)}
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
    from orchestra.huggingface.config_json import architecture_of
    from orchestra.huggingface.hub_names import OUTPUT

    model, manifest = folder.model, folder.manifest
    print(folder.place)
    print(
        f"{architecture_of(model).title}: {model.num_hidden_layers} layers, hidden {model.hidden_size:,}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} key-value), "
        f"vocabulary {model.vocab_size:,}"
    )
    if model.num_experts:
        print(
            f"{model.num_experts} experts of width {expert_width(model):,}, of which a token goes through "
            f"{model.num_experts_per_tok}"
        )
    size = figures.quantity(float(manifest.num_bytes))
    types = ", ".join(folder.dtypes)
    print(f"{folder.num_parameters:,} parameters in {len(manifest.tensors)} tensors ({types})")
    print(f"{size}B in {figures.number_of(len(manifest.files), 'file')}")
    print("names, shapes and types of all tensors fit; the weights themselves were not read")
    if folder.has_second_output:
        tied = f"{OUTPUT} is in the files and left out: config.json ties it to the embeddings"
        advice = "transformers 5 uses it where its numbers differ; so do runs from a copy that says false"
        print("\n".join(figures.wrapped(f"{tied} ({advice})", "note: ", " " * 6)))
    print()
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
