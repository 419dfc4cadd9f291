"""`orchestra checkpoint export RUN [STEP] --to FOLDER`: a run's model for Hugging Face. Reads the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.checkpoint_errors import DamagedError
from conf.schema import Config, DataConfig, ModelConfig, Source
from orchestra.cli.checkpoint.checkpoint_ls_command import (
    Place,
    add_run_arguments,
    chosen_checkpoints,
    explained,
    first_look,
    open_place,
    refuse_untold,
)
from orchestra.cli.text import figures
from orchestra.data.token_files import local_prefix, read_index, token_file_prefix
from orchestra.errors import EXIT_DONE, ConfigError, DataError, OrchestraError
from orchestra.report.run_state import name_of

if TYPE_CHECKING:
    from orchestra.huggingface.export import ExportPlan, ExportRequest

_TOKENIZER = "tokenizer.json"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_EXPLAINED = """\
Writes config.json and safetensors files that `transformers` loads:

  orchestra checkpoint export RUN --to my-model
  python -c 'import transformers as t; t.AutoModel.from_pretrained("my-model")'

Every byte that is read is compared with its checksum. Where no STEP is given, the newest checkpoint that is
intact is taken. --dtype fp32 keeps the numbers as they were trained; bf16 and fp16 round to nearest.
The tokenizer.json that packed the data goes along where it lies beside the token file, or is named, with a
tokenizer_config.json by which transformers takes it as it is.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, step_help="default: the newest that is intact")
    parser.add_argument("--format", choices=["hf"], default="hf", help="hf: Hugging Face (default)")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="default: fp32")
    parser.add_argument(
        "--max-shard-size", type=_size, default=5 * 10**9, metavar="SIZE", help="largest file (default: 5GB)"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="the tokenizer.json that packed the data (default: beside it)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written; write nothing")
    parser.add_argument("--json", action="store_true", help="print the result (or the plan) as JSON")
    parser.epilog = _EXPLAINED


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ArgumentTypeError(f"{text!r} is no size; give e.g. 5GB or 500MB")
    power = _POWERS[match[2].upper()] if match[2] else 0
    return max(1, int(float(match[1]) * (1024 if match[3] else 1000) ** power))


@dataclass(frozen=True)
class ExportTokenizer:
    """What turned the text into tokens: its name, the token that ends a document, its file here, and what
    that calls the token; None: not known.
    """

    name: str | None = None
    end_of_text: int | None = None
    file: Path | None = None
    separator: str | None = None


def run(arguments: Namespace) -> int:
    """Export and return 0."""
    from orchestra.huggingface.export import SAFETENSORS_NAMES, ExportRequest, refuse_target

    place = open_place(arguments.run, arguments.dir)
    tokenizer = tokenizer_of(place.config.data, arguments.tokenizer)
    if "://" in arguments.to:
        raise ConfigError(
            f"--to {arguments.to}: give a folder on this machine and copy it to its place afterwards"
        )
    wanted = ExportRequest(
        target=Path(arguments.to).expanduser().absolute(),
        dtype=SAFETENSORS_NAMES[arguments.dtype],
        max_file_bytes=arguments.max_shard_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.file,
        separator=tokenizer.separator,
    )
    refuse_target(wanted.target)
    with explained():
        step, plan = _first_intact(place, arguments.step, wanted, is_dry_run=arguments.dry_run)
    record = {
        "run": name_of(place.run),
        "step": step,
        "folder": str(wanted.target),
        "dtype": arguments.dtype,
        "tokenizer": tokenizer.name,
        "written": not arguments.dry_run,
        "files": plan.names,
        "num_bytes": plan.num_bytes,
        "num_parameters": plan.num_parameters,
    }
    if arguments.json:
        print(json.dumps(record))
    else:
        _print_result(record, tokenizer)
    return EXIT_DONE


def _first_intact(
    place: Place, step: int | None, wanted: ExportRequest, *, is_dry_run: bool
) -> tuple[int, ExportPlan]:
    """Export the step that was asked for, else the newest that proves intact while it is read."""
    from orchestra.huggingface.export import plan_export, write_export

    found = chosen_checkpoints(place, step)
    for checkpoint in found:
        storage, each = place.storage_of(checkpoint), checkpoint.step
        look = first_look(storage, checkpoint)
        refuse_untold(look)
        damage = look.damage
        if damage is None and look.manifest is not None:
            plan = plan_export(look.manifest, _as_trained(place.config), wanted)
            try:
                if not is_dry_run:
                    write_export(storage, look.manifest, plan, checkpoint.folder)
                return each, plan
            except DamagedError as error:
                damage = str(error)
        if step is not None:
            raise DataError(f"the checkpoint of step {each} is damaged: {damage}; nothing was written")
        print(f"passed over step {each}: {damage}", file=sys.stderr)
    raise OrchestraError(
        f"none of {name_of(place.run)}'s {len(found)} checkpoints is intact; nothing was written"
    )


def _as_trained(config: Config) -> ModelConfig:
    """Return the run's model with the places that it was trained on: rotary positions have no last one, and
    whoever serves a model takes no text beyond max_position_embeddings.
    """
    longest = max(config.model.max_position_embeddings, config.train.seq_len)
    return replace(config.model, max_position_embeddings=longest)


def tokenizer_of(data: DataConfig, given: str | None = None) -> ExportTokenizer:
    """Return what a run's data says about its tokenizer, where the index of a token file can be read here;
    its file is the one that is `given`, else beside the token file. Raises ConfigError where a given one is
    not that which packed the data.
    """
    from orchestra.data.tokenizer import BYTES, ByteTokenizer, name_of_token

    index, beside = None, Path()
    if data.source == Source.stdlib and given is None:
        return ExportTokenizer(BYTES, ByteTokenizer.separator_id)
    path = data.path or next((part.path for part in data.blend), None)
    prefix = None if path is None else local_prefix(token_file_prefix(path))
    if prefix is not None:
        # The data may be gone by now; the weights do not need it.
        with contextlib.suppress(DataError):
            index = read_index(Path(f"{prefix}.json"))
            beside = Path(prefix).parent / index.tokenizer
    file = beside if given is None else Path(given).expanduser()
    file = file / _TOKENIZER if file.is_dir() else file
    is_same = index is not None and file.is_file() and _sha256(file) == index.tokenizer_sha256
    if given is not None and not is_same:
        expected = (
            "this run's data has none" if index is None else f"expected is {index.tokenizer_sha256[:16]}"
        )
        raise ConfigError(f"--tokenizer {given}: is not the file that packed the run's data: {expected}")
    if index is None:
        return ExportTokenizer()
    if not is_same:
        return ExportTokenizer(index.tokenizer, index.separator_id)
    name = name_of_token(file, index.separator_id)
    return ExportTokenizer(index.tokenizer, index.separator_id, file, name)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _print_result(record: dict[str, Any], tokenizer: ExportTokenizer) -> None:
    size = figures.quantity(float(record["num_bytes"]))
    print(f"{'wrote' if record['written'] else 'would write'} {record['folder']}")
    print(f"step {record['step']} of {record['run']}, {record['num_parameters']:,} parameters")
    print(f"{record['dtype']}, {size}B in {len(record['files'])} files")
    print("\n".join(figures.wrapped(_about_tokenizer(tokenizer))))
    if record["written"]:
        print(f"start a run from it: orchestra checkpoint import {shlex.quote(record['folder'])}")


def _about_tokenizer(tokenizer: ExportTokenizer) -> str:
    if tokenizer.name == "bytes":
        return (
            "no tokenizer is written: this model reads bytes. Token i below 256 is the byte i of UTF-8, "
            f"{tokenizer.end_of_text} ends a document (eos_token_id)"
        )
    if tokenizer.file is not None:
        return f"with {_TOKENIZER}, which packed the data; eos_token_id is {tokenizer.end_of_text}"
    if tokenizer.name is None:
        return "no tokenizer is written, and eos_token_id is null: the run's token files cannot be read here"
    return (
        f"no tokenizer is written: {tokenizer.name}, which packed the data, does not lie beside it; name it "
        f"with --tokenizer FILE; eos_token_id is {tokenizer.end_of_text}"
    )
