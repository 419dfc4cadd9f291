"""What one rank of the checkpoint benchmark does: it trains, saves in every way in turn, and restores.

All ranks go through the same turns; rank 0 writes what was measured as JSON. What the figures mean for the
targets is decided elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import checkpoint_gauges as gauges
import fsspec
import torch
import torch.distributed as dist
from checkpoint_report import DCP_LOAD, DCP_SAVE, LIMIT_BUFFERED, LIMIT_DIRECT, LIMIT_MEMCPY, RESTORES
from checkpoint_savers import (
    Finish,
    Orchestra,
    Saver,
    State,
    dcp_load,
    llama_shapes,
    preset_shapes,
    savers,
)

_TINY_BYTES = 3 << 20
_WAIT = timedelta(minutes=10)


def serve(arguments: argparse.Namespace) -> None:
    """Be one rank: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT stand in the environment."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo"
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=_WAIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_WAIT)
    # A connection of its own, as the checkpointer's threads wait by it while training uses the other.
    talk = dist.TCPStore(*address, world_size, is_master=False, timeout=_WAIT)
    results = Rank(arguments, rank, world_size, device, talk).measured()
    if rank == 0:
        Path(arguments.results).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


class Rank:
    """One rank and all it needs for its turns."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        rank: int,
        world_size: int,
        device: torch.device,
        store: dist.Store,
    ) -> None:
        self._arguments = arguments
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._folder = Path(arguments.scratch)
        self._control = dist.new_group(backend="gloo")
        self._peers_group = dist.new_group(backend="gloo")
        self._orchestra = Orchestra(store)
        known = savers(self._peers_group, self._orchestra, device)
        self._savers = {name: it for name, it in known.items() if name not in arguments.skip}
        self._num_places = 0
        self._is_warm = False
        fsspec.register_implementation("counted", gauges.CountingFileSystem, clobber=True)

    def measured(self) -> dict[str, Any]:
        """Return all figures of this number of ranks."""
        arguments = self._arguments
        size = int(arguments.gigabytes * 1e9)
        shapes = preset_shapes(arguments.model) if arguments.model else llama_shapes(size)
        self._warm_up()
        self._is_warm = True
        training = gauges.Training(self._device)
        layouts = {}
        for layout in arguments.layouts:
            state = State.make(layout, shapes, self._rank, self._world_size, self._device)
            layouts[layout] = {
                "state_bytes": state.num_bytes,
                **self._saves(state, training),
                "restores": self._restores(state) if not arguments.no_restore else {},
            }
            del state
        return {
            "ranks": self._world_size,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "can_drop_caches": gauges.can_drop_caches(),
            "layouts": layouts,
        }

    def _warm_up(self) -> None:
        """Use everything once with a small state: imports, DCP's process, connections."""
        for layout in self._arguments.layouts:
            shapes = llama_shapes(_TINY_BYTES)
            state = State.make(layout, shapes, self._rank, self._world_size, self._device)
            for saver in self._savers.values():
                place = self._place()
                saver.open(state, place)
                saver.save()()
                saver.close()
                self._remove(place)
            if not self._arguments.no_restore:
                self._restores(state, repeats=1, caches=["warm"])

    def _place(self) -> Path:
        self._num_places += 1
        return self._folder / f"place-{self._num_places}"

    def _remove(self, place: Path) -> None:
        dist.barrier(self._control)
        if self._rank == 0:
            shutil.rmtree(place)
        dist.barrier(self._control)

    def _say(self, text: str) -> None:
        if self._rank == 0 and self._is_warm and not self._arguments.quiet:
            print(text, file=sys.stderr, flush=True)

    # Saving.

    def _saves(self, state: State, training: gauges.Training) -> dict[str, Any]:
        """Let every saver save in turn, round after round; another one begins each round."""
        names = list(self._savers)
        saves: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        limits: dict[str, list[float | None]] = {
            name: [] for name in (LIMIT_MEMCPY, LIMIT_BUFFERED, LIMIT_DIRECT)
        }
        for round_number in range(self._arguments.repeats):
            self._measure_limits(state, limits)
            first = round_number % len(names)
            for name in names[first:] + names[:first]:
                turn = self._turn(self._savers[name], state, training)
                saves[name].append(turn)
                self._say(
                    f"{self._world_size} ranks, {state.layout}, round {round_number + 1}: {name}: "
                    f"{turn['blocked_s']:.2f} s blocked, {turn['lost_s']:.2f} s lost, {turn['whole_s']:.2f} s"
                )
        return {"saves": saves, "limits": limits}

    def _turn(self, saver: Saver, state: State, training: gauges.Training) -> dict[str, Any]:
        place = self._place()
        peak = gauges.MemoryPeak()
        saver.open(state, place)
        try:
            loss = training.loss_by(saver.save, self._control)
            rise = peak.rise()
        finally:
            saver.close()
        is_ours = saver is self._orchestra
        needs = self._orchestra.needs if is_ours else None
        staging = needs.staging_bytes if needs else 0
        rise_bytes, staging_bytes, beyond = gauges.slowest(
            [rise, staging, (rise - staging) / staging if staging else 0.0], self._control
        )
        self._remove(place)
        return {
            **asdict(loss),
            "memory_rise_bytes": int(rise_bytes),
            "staging_bytes": int(staging_bytes) if is_ours else None,
            "beyond_staging": beyond if is_ours else None,
            "committed_s": self._orchestra.committed_s if is_ours else None,
        }

    def _measure_limits(self, state: State, limits: dict[str, list[float | None]]) -> None:
        """Add the seconds of copying a rank's share, and of writing all of it."""
        share = state.num_bytes // self._world_size
        tensors = list(state.tensors.values())
        limits[LIMIT_MEMCPY].append(gauges.copy_seconds(tensors, share, self._control))
        for name, direct in ((LIMIT_BUFFERED, False), (LIMIT_DIRECT, True)):
            limits[name].append(
                gauges.write_seconds(self._folder, state.num_bytes, self._control, direct=direct)
            )

    # Restoring.

    def _restores(
        self, state: State, repeats: int | None = None, caches: list[str] | None = None
    ) -> dict[str, Any]:
        """Restore in every way in turn, from the warm page cache and from the disk."""
        arguments = self._arguments
        caches = [it for it in caches or arguments.caches if it == "warm" or gauges.can_drop_caches()]
        ours, theirs = self._place(), self._place()
        self._write(self._orchestra, state, ours)
        self._write(savers(self._peers_group, self._orchestra, self._device)[DCP_SAVE], state, theirs)
        expected = state.fingerprint()
        found: dict[str, dict[str, list[Any]]] = {
            name: {cache: [] for cache in caches} for name in (*RESTORES, DCP_LOAD)
        }
        for round_number in range(repeats or arguments.repeats):
            first = round_number % len(found)
            for cache in caches:
                for name in [*found][first:] + [*found][:first]:
                    place = theirs if name == DCP_LOAD else ours
                    self._make_cache(cache, place)
                    found[name][cache].append(self._restore(name, state, str(place)))
                    self._check(name, state, expected)
        counted = {}
        if arguments.count:
            for name in RESTORES:
                counted[name] = self._counted(name, state, ours)
                self._check(name, state, expected)
        self._remove(ours)
        self._remove(theirs)
        return {"timed": found, "counted_bytes": counted}

    def _write(self, saver: Saver, state: State, place: Path) -> None:
        saver.open(state, place)
        finish: Finish = saver.save()
        finish()
        saver.close()

    def _make_cache(self, cache: str, place: Path) -> None:
        dist.barrier(self._control)
        if self._rank == 0:
            gauges.drop_caches() if cache == "dropped" else gauges.warm_caches(place)
        dist.barrier(self._control)

    def _restore(self, name: str, state: State, place: str) -> dict[str, float]:
        """Restore once; return seconds, the bytes it says it read, and those the kernel counted."""
        state.clear()
        state_dict = state.state_dict()

        def act() -> int | None:
            if name == DCP_LOAD:
                dcp_load(state_dict, place, self._peers_group)
                return None
            return self._orchestra.restore(state, place, name)

        from_disk, asked = gauges.kernel_bytes("read_bytes"), gauges.kernel_bytes("rchar")
        seconds, said = gauges.timed(act, self._control)
        if said is None:
            # DCP does not tell; all it reads comes through read calls.
            said = gauges.kernel_bytes("rchar") - asked
        from_disk = gauges.kernel_bytes("read_bytes") - from_disk
        said_bytes, kernel_bytes = gauges.summed([said, from_disk], self._control)
        self._say(
            f"{self._world_size} ranks, {state.layout}: restore by {name}: {seconds:.2f} s, "
            f"{said_bytes / 1e9:.2f} GB read, {kernel_bytes / 1e9:.2f} GB from the disk"
        )
        return {"seconds": seconds, "said_bytes": said_bytes, "kernel_bytes": kernel_bytes}

    def _counted(self, name: str, state: State, place: Path) -> float:
        """Return the bytes that all ranks together read through a counting file system under fsspec."""
        state.clear()
        gauges.CountingFileSystem.num_bytes = 0
        self._orchestra.restore(state, f"counted://{place}", name)
        return gauges.summed([gauges.CountingFileSystem.num_bytes], self._control)[0]

    def _check(self, name: str, state: State, expected: list[int]) -> None:
        if state.fingerprint() != expected:
            sys.exit(f"rank {self._rank}: what {name} restored is not what was saved")
