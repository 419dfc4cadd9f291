"""`orchestra checkpoint import --from dcp`: what a checkpoint of torch.distributed.checkpoint becomes here.

Without overrides a checkpoint that a torch loop of one's own restores, with its optimizer; with those of a
Llama (`model=llama3_8b`) a Hugging Face folder for `model.init_from`. A process of its own reads the source.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpointing
from checkpointing.catalog import read_manifest
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage, open_storage
from conf.schema import ModelConfig
from orchestra.config.compose import merge, typed
from orchestra.config.overrides import check_overrides
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.export import STORED, ExportRequest, plan_export, refuse_target, write_export
from orchestra.huggingface.llama_names import renames

# The module's own.
_EXIT_REFUSED = 3


@dataclass(frozen=True)
class DcpSource:
    """What is to be imported: the folder, the key of the model's state dict in it where that has to be said,
    and its step.
    """

    place: str
    model_key: str | None
    step: int | None

    def ask(self, act: str, **request: Any) -> dict[str, Any]:
        """Let a process of its own do `act`, and return its answer. Raises DataError with its words, and
        ConfigError where nothing lies at the place.
        """
        if self._is_missing():
            is_local = "://" not in self.place
            found = "is no folder of this machine" if is_local else "is not there or empty"
            raise ConfigError(
                f"{self.place} {found}; give the folder that torch.distributed.checkpoint wrote, with its "
                ".metadata"
            )
        asked = {"act": act, "source": _absolute(self.place), "model": self.model_key, "step": self.step}
        # Our own packages first, and not the working directory.
        own = str(Path(checkpointing.__file__).parents[1])
        path = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "checkpointing.dcp.dcp_import"],
            input=json.dumps({**asked, **request}),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        if done.returncode == 0:
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return answer
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        if done.returncode == _EXIT_REFUSED:
            raise DataError(last[0])
        why = f"ended with {signal.Signals(-done.returncode).name}" if done.returncode < 0 else last[0]
        raise DataError(f"{self.place}: the process that reads it failed: {why}; nothing was imported")

    def _is_missing(self) -> bool:
        if "://" not in self.place:
            return not Path(_absolute(self.place)).is_dir()
        try:
            return not open_storage(self.place).names()
        except CheckpointError:
            # The process that reads it tells why.
            return False


def model_of(overrides: Sequence[str]) -> ModelConfig:
    """Return the model that overrides describe. Raises ConfigError, also for keys that are not of a model."""
    strangers = [text for text in overrides if not text.startswith(("model=", "model."))]
    if strangers:
        raise ConfigError(
            [f"{text}: only the model is described here: model=PRESET, model.KEY=VALUE" for text in strangers]
        )
    checked = check_overrides(overrides)
    if checked.problems:
        raise ConfigError(checked.problems)
    return typed(merge(checked)[0]).model


def import_loop(source: DcpSource, target: str, *, model_only: bool, is_dry_run: bool) -> dict[str, Any]:
    """Write the state of a loop as a checkpoint at `target`, and return what it holds."""
    target = _absolute(target)
    answer = source.ask("describe" if is_dry_run else "import", target=target, model_only=model_only)
    answer.pop("tensors", None)
    return {"source": source.place, "target": target, "written": not is_dry_run, **answer}


def import_llama(source: DcpSource, target: str, model: ModelConfig, *, is_dry_run: bool) -> str:
    """Write the model of a checkpoint as a Hugging Face folder, and return its path.

    Raises DataError where it is another model, ConfigError where the folder is taken.
    """
    if "://" in target:
        raise ConfigError(f"{target}: give a folder on this machine; a Llama is written to one")
    folder = Path(_absolute(target))
    refuse_target(folder)
    tensors = source.ask("describe", model_only=True, renames={})["tensors"]
    named = renames(tensors, model, source.place)
    dtype = _dtype(tensors[name][0] for name in named)
    if not is_dry_run:
        with _checkpoint_of(source, folder, named) as (storage, manifest):
            write_export(storage, manifest, plan_export(manifest, model, ExportRequest(folder, dtype)))
    return str(folder)


@contextlib.contextmanager
def _checkpoint_of(
    source: DcpSource, folder: Path, named: Mapping[str, Any]
) -> Iterator[tuple[Storage, Manifest]]:
    """Give a checkpoint of the model beside the folder, which is removed in the end."""
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.dcp")
    try:
        answer = source.ask("import", target=str(draft), model_only=True, renames=named)
        storage = open_storage(draft)
        yield storage, read_manifest(storage, answer["step"])
    except CheckpointError as error:
        raise DataError(f"{source.place}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _dtype(dtypes: Iterator[str]) -> str:
    """Return the type that holds the numbers of all types."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else next(iter(STORED))


def _absolute(place: str) -> str:
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))  # noqa: PTH100,PTH111
