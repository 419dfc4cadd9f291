"""Uses the model of one checkpoint on this machine, in one process.

`orchestra eval` and `orchestra generate` start it (`python -m orchestra.train.inference.use_checkpoint`):
a command loads no torch. A request comes as JSON on standard input, the answer goes as one line of JSON to
standard output. A checkpoint that is damaged ends it with `EXIT_DAMAGED`: the caller may ask for another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpointing.box import Box
from checkpointing.catalog import StoredCheckpoint, read_manifest
from checkpointing.checkpoint_errors import CheckpointError, DamagedError
from checkpointing.integrity import checksums
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage, open_storage
from conf.schema import Config, Device, PrecisionConfig, PrecisionName
from orchestra.data.held_out import held_out_data
from orchestra.data.token_files import allow_many_files
from orchestra.errors import EXIT_DONE, EXIT_FAILED, DataError, OrchestraError
from orchestra.model.transformer import Transformer
from orchestra.parallel.expert_balance import mixtures_of
from orchestra.parallel.mesh import make_mesh
from orchestra.precision.policies import policy
from orchestra.run.config_file import read_config
from orchestra.sizes.topology import BatchShape, Layout, global_batch_size
from orchestra.train.build import meta_model
from orchestra.train.inference.evaluation import HeldOutLoss, num_samples, open_held_out
from orchestra.train.inference.sampling import Choice, sampled

EXIT_DAMAGED = 3
# What the checkpoint calls the parameters.
_PREFIX = "model."
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Sequences of one forward pass where the configuration leaves it to the ranks.
_MICRO_BATCH = 8


def load_model(
    storage: Storage, folder: str, manifest: Manifest, config: Config, device: torch.device
) -> Transformer:
    """Return the run's model with a checkpoint's weights, in the precision that the run computes in.

    Every byte is compared with its checksum. Raises DamagedError, StorageError, and DataError for a
    checkpoint of another model.
    """
    model = meta_model(config)
    model.to_empty(device=device).to(policy(_without_fp8(config.precision)).parameter)
    model.tie_weights()
    # Those by which experts are chosen are fp32 in every precision; the others count in training alone.
    biases = {name: buffer.float() for name, buffer in model.named_buffers() if name.endswith("_bias")}
    for name, bias in biases.items():
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, bias)
    for name, parameter in (*model.named_parameters(), *biases.items()):
        stored = manifest.tensors.get(_PREFIX + name)
        if stored is None or stored.shape != tuple(parameter.shape) or stored.dtype not in _TYPES:
            found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise DataError(f"{_PREFIX}{name}: the checkpoint has {found}, the model {list(parameter.shape)}")
        whole = Box.whole(stored.shape)
        for chunk in stored.chunks:
            if not chunk.num_bytes:
                continue
            content = bytearray(chunk.num_bytes)
            storage.read_into(f"{folder}/{chunk.file}", chunk.begin, memoryview(content))
            if checksums.of_chunk(content) != chunk.checksum:
                raise DamagedError("its bytes are not those that were saved", file=chunk.file, tensor=name)
            part = torch.frombuffer(content, dtype=_TYPES[stored.dtype]).view(chunk.box.shape)
            parameter.data[chunk.box.within(whole)] = part.to(device)
    return model.requires_grad_(requires_grad=False)


def _without_fp8(precision: PrecisionConfig) -> PrecisionConfig:
    """Return a precision that any machine computes in: the 16 bits that fp8 rounds from."""
    is_fp8 = precision.name is PrecisionName.fp8
    return replace(precision, name=PrecisionName.bf16) if is_fp8 else precision


def _evaluated(model: Transformer, config: Config, device: torch.device, request: Mapping[str, Any]) -> Any:
    """Return the mean losses by source, as the run that trains finds them."""
    steps = request["eval_steps"]
    config = replace(config, eval=replace(config.eval, steps=steps, data=request["eval_data"]))
    size = global_batch_size(config.train, request["dp"])
    micro = config.train.micro_batch_size
    micro = min(micro if isinstance(micro, int) else _MICRO_BATCH, size)
    batch = BatchShape(size, micro, -(-size // micro), 1, config.train.seq_len)
    sources = open_held_out(held_out_data(config), config)
    limit = num_samples(config.eval, batch.global_batch_size)
    loss = HeldOutLoss(sources, limit, model, batch, make_mesh(0, Layout(1), device))
    return {"losses": loss.compute(), "tokens": loss.num_tokens}


def _sampled(model: Transformer, config: Config, _: torch.device, request: Mapping[str, Any]) -> Any:
    """Return the tokens that follow those of the request."""
    choice = Choice(request["temperature"], request["top_p"], request["seed"])
    for mixture in mixtures_of(model).values():
        # The capacity of experts is that of a whole sequence, as in training, however few tokens there are.
        mixture.whole_length = config.train.seq_len
    tokens = sampled(
        model,
        request["tokens"],
        choice,
        max_tokens=request["max_tokens"],
        vocab_size=request["vocab_size"],
        # Places beyond those that were trained on mean nothing to the model.
        context=config.train.seq_len,
        end_id=request["end_id"],
    )
    return {"tokens": tokens}


ACTS = {"eval": _evaluated, "generate": _sampled}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load the checkpoint that a request names, and do with its model what it asks for."""
    config = read_config(Path(request["config"]))
    torch.set_float32_matmul_precision("highest")
    is_gpu = config.cluster.device is not Device.cpu and torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    storage = open_storage(request["storage"])
    checkpoint = StoredCheckpoint(**request["checkpoint"])
    manifest = read_manifest(storage, checkpoint)
    model = load_model(storage, checkpoint.folder, manifest, config, device)
    found: dict[str, Any] = ACTS[request["act"]](model, config, device, request)
    return {**found, "device": device.type}


def main() -> int:
    allow_many_files()
    try:
        sys.stdout.write(f"{json.dumps(answer(json.load(sys.stdin)))}\n")
        return EXIT_DONE
    except DamagedError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_DAMAGED
    except (OrchestraError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
