"""Rules about checkpoints: where they go, and whether one fits there and in memory.

Nothing is written and no remote place is asked: what only the storage knows is for the first save to say.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Config, Device, LauncherName, Offload
from orchestra.config.keys import nearest
from orchestra.config.machine import Situation, absolute, world_size
from orchestra.config.rules.place_rules import existing_part, rule_memory, trained_bytes
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.save_interval import AUTO
from orchestra.sizes.training_shape import checkpoint_bytes, saved_bytes_per_parameter
from orchestra.sizes.units import binary, duration_s

_LOCAL_PROTOCOLS = ("file", "local")
# Folders that each node has for itself.
_OF_A_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Protocols whose files fsspec only reads, or reads as parts of one.
_ONLY_READ = (
    *("http", "https", "data", "git", "github", "gist", "dvc", "pyscript"),
    *("zip", "tar", "libarchive", "reference"),
)


def rule_checkpoint_steps(config: Config, _: Situation) -> Iterator[str]:
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    if config.checkpoint.every_s is not None:
        if kept is not None:
            yield (
                f"checkpoint.keep_every_steps={kept} needs a number in checkpoint.every_steps that it is a "
                f"multiple of: with checkpoint.every_s nobody knows beforehand which are saved; use null"
            )
        return
    if isinstance(every, str):
        if duration_s(every) is not None:
            yield f"checkpoint.every_steps={every} is a time and no number; use checkpoint.every_s={every}"
        elif every != AUTO:
            yield f"checkpoint.every_steps={every} is no number of steps; use one, {AUTO} or null"
        elif kept is not None:
            yield (
                f"checkpoint.keep_every_steps={kept} needs a number in checkpoint.every_steps that it is a "
                f"multiple of: with {AUTO} nobody knows beforehand which steps are saved; use e.g. {kept}"
            )
        return
    if kept is None or kept < 1 or (every is not None and every < 1):
        return
    if every is None:
        yield (
            f"checkpoint.keep_every_steps={kept}, but checkpoint.every_steps=null saves nothing; give "
            f"checkpoint.every_steps, or use checkpoint.keep_every_steps=null"
        )
    elif kept % every:
        yield (
            f"checkpoint.keep_every_steps={kept} is no multiple of checkpoint.every_steps={every}: most of "
            f"these steps are never saved; use e.g. {max(1, round(kept / every)) * every}"
        )


def rule_checkpoint_place(config: Config, situation: Situation) -> Iterator[str]:
    """A URL's protocol must be known here and one to write to; a local folder one that can be written."""
    yield from _place_problems("checkpoint.dir", config.checkpoint.dir, situation)
    yield from _of_a_node("checkpoint.dir", config.checkpoint.dir, config)


def _of_a_node(key: str, place: str | None, config: Config) -> Iterator[str]:
    """What only one node of a job sees."""
    folder = None if place is None else local_folder(place)
    if folder is None or config.cluster.launcher is not LauncherName.slurm:
        return
    of_node = next((root for root in _OF_A_NODE if folder.is_relative_to(root)), None)
    # Where the runs lie there, all nodes see it.
    if of_node is not None and not Path(absolute(config.run.dir)).is_relative_to(of_node):
        yield (
            f"{key}={place}: {of_node} is each node's own, and no other node or later job "
            "would find a checkpoint there; give a folder that all nodes see, or a URL such as s3://bucket/x"
        )


def rule_fallback_place(config: Config, situation: Situation) -> Iterator[str]:
    """The fallback must be a place too, another one, and one that all nodes of a job see."""
    place = config.checkpoint.fallback_dir
    if place is None or not place.strip():
        return
    yield from _place_problems("checkpoint.fallback_dir", place, situation)
    own = config.checkpoint.dir
    if own is not None and f"{place.rstrip('/')}/".startswith(f"{own.rstrip('/')}/"):
        yield (
            f"checkpoint.fallback_dir={place} lies in checkpoint.dir={own} itself: what fails there fails "
            "here; give a folder on another storage"
        )
    yield from _of_a_node("checkpoint.fallback_dir", place, config)


def _place_problems(key: str, place: str | None, situation: Situation) -> Iterator[str]:
    if place is None or not place.strip():
        return
    protocols = place.rpartition("://")[0].split("::") if "://" in place else []
    if protocols and not place.rpartition("://")[2].strip("/"):
        yield f"{key}={place} names no bucket; give a folder in one, such as {place.rstrip('/')}//bucket/runs"
    for protocol in protocols:
        yield from _protocol_problems(f"{key}={place}", protocol.partition("://")[0])
    folder = local_folder(place)
    if folder is None:
        return
    existing = existing_part(folder)
    if not existing.is_dir():
        yield f"{key}={place}: {existing} is not a folder; give the path of one"
    elif situation.starts_here and not os.access(existing, os.W_OK | os.X_OK):
        yield f"{key}={place}: nothing can be written in {existing}; choose another folder"


def _protocol_problems(named: str, protocol: str) -> Iterator[str]:
    import fsspec

    if protocol == "memory":
        yield f"{named} lies in each process's own memory and ends with it; give a folder"
        return
    if protocol in _ONLY_READ:
        yield (
            f"{named}: {protocol}:// cannot hold checkpoints, it is only read from; use e.g. "
            f"s3://, gs:// or the path of a folder"
        )
        return
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        yield f"{named}: {protocol}:// needs a package that is not installed here: {error}"
    except ValueError:
        meant = nearest(protocol, list(fsspec.available_protocols()))
        hint = f"did you mean {meant}://?" if meant else "use e.g. s3://, gs:// or the path of a folder"
        yield f"{named}: fsspec knows no protocol {protocol}://; {hint}"


def rule_checkpoint_space(config: Config, situation: Situation) -> Iterator[str]:
    """The storage must hold one checkpoint; remote storage is not asked. What a run that goes on removes
    first is known to itself alone.
    """
    if not situation.starts_here or situation.verb == "resume" or not _saves(config):
        return
    name = "run.dir" if config.checkpoint.dir is None else "checkpoint.dir"
    place = config.checkpoint.dir or config.run.dir
    folder = local_folder(place)
    if folder is None:
        return
    try:
        free = shutil.disk_usage(existing_part(folder)).free
    except OSError:
        # Whoever writes there first says what is wrong with it.
        return
    needed = checkpoint_bytes(config)
    if needed > free:
        yield (
            f"{name}={place}: one checkpoint needs {_counted(config)} = {binary(needed)}, but "
            f"{binary(free)} are free there; free some, choose another checkpoint.dir, or save nothing "
            f"with checkpoint.every_steps=null"
        )


def rule_checkpoint_memory(config: Config, situation: Situation) -> Iterator[str]:
    """What is saved is first copied to host memory, on CPU beside what training itself takes."""
    memory, ranks, cluster = situation.memory_bytes, world_size(config), config.cluster
    if memory is None or ranks is None or cluster.launcher is not LauncherName.local or not _saves(config):
        return
    if any(rule_memory(config, situation)):
        return
    trained = trained_bytes(config, ranks) if cluster.device is Device.cpu else 0
    if config.parallelism.offload is Offload.optimizer_disk:
        # The image lies beside the state, on the disk.
        return
    needed = trained + checkpoint_bytes(config)
    if needed > memory:
        beside = f" beside the {binary(trained)} that training takes" if trained else ""
        yield (
            f"model={config.model.name}: saving a checkpoint needs {_counted(config)} = "
            f"{binary(checkpoint_bytes(config))} of host memory{beside}, but this machine has "
            f"{binary(memory)}; use a smaller model, fewer ranks, or save nothing with "
            f"checkpoint.every_steps=null"
        )


def local_folder(place: str) -> Path | None:
    """Return the folder that a place means on this machine; None for a URL of another."""
    protocol, separator, path = place.rpartition("://")
    if separator and protocol not in _LOCAL_PROTOCOLS:
        return None
    return Path(absolute(path))


def _saves(config: Config) -> bool:
    return config.checkpoint.every_steps is not None and config.model.num_attention_heads > 0


def _counted(config: Config) -> str:
    return f"{num_parameters(config.model):,} parameters × {saved_bytes_per_parameter(config):.4g} bytes"
