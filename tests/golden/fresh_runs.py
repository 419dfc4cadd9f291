"""Small runs on this machine's processor: what four layouts compute, and the keys of what they write."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from goldens import keys_of, rows, run, stopped

NUM_STEPS = 6
# The exit code of a run that can be continued.
STOPPED = 75
# A model of 808,064 parameters; all of its layers are cut by tp=2 and by every stage of ZeRO.
SMALL = (
    "model=debug",
    f"train.steps={NUM_STEPS}",
    "train.seq_len=64",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.deterministic=true",
    "optim.lr=1e-3",
    "data=tokens",
    "data.path=corpus",
    "data.ledger=true",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=2",
    "checkpoint.async_save=false",
    "wandb.mode=disabled",
    "cluster.device=cpu",
    "cluster.threads_per_rank=1",
    # Known, so that nobody spends time measuring it.
    "cluster.peak_tflops=1",
    # Would write events where a busy machine slows one rank.
    "recovery.straggler_every_steps=null",
)
LAYOUTS = {
    "single": ("cluster.gpus_per_node=1",),
    # Fails after the checkpoint of step 4, and must compute the same in spite of it.
    "dp2-zero1": (
        *("cluster.gpus_per_node=2", "parallelism.zero=1"),
        "recovery.inject=[{at_step: 5, rank: 1, fault: exception}]",
    ),
    # A step that is not finite changes nothing.
    "dp2-zero2": (
        *("cluster.gpus_per_node=2", "parallelism.zero=2"),
        "recovery.inject=[{at_step: 3, rank: 0, fault: nan}]",
    ),
    "tp2-sequence-parallel": (
        "cluster.gpus_per_node=2",
        "parallelism.tp=2",
        "parallelism.sequence_parallel=true",
    ),
}
# Kernels are chosen by these; another processor adds in another order.
_INSTRUCTIONS = ("avx", "amx", "fma", "sse4", "f16c", "asimd", "sve", "bf16")


def pack_corpus(folder: Path) -> None:
    """Write token files that are the same everywhere: no Python's own files, which differ by version."""
    words = [str(number * number % 7919) for number in range(6000)]
    (folder / "corpus.txt").write_text(" ".join(words))
    done = run(folder, "data", "pack", "corpus.txt", "--output", "corpus")
    assert done.returncode == 0, done.stderr


def train(folder: Path, layout: str) -> Path:
    """Train a layout to its end; return the run's directory."""
    done = run(folder, "run", f"run.name={layout}", *SMALL, *LAYOUTS[layout])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / layout


def stop(folder: Path) -> Path:
    """Start a run without end and ask it to stop with a signal; return the run's directory."""
    endless = ("train.steps=1000000", "optim=adamw_constant", "checkpoint.every_steps=1000000")
    words = ("run", "run.name=stopped", *SMALL, "cluster.gpus_per_node=1", *endless)
    code, said = stopped(folder, folder / "runs" / "stopped" / "metrics.jsonl", *words)
    assert code == STOPPED, said
    return folder / "runs" / "stopped"


def processor() -> dict[str, str]:
    """Return what decides the bits of a sum: the processor, its instructions, and torch's version."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {
        "model": facts.get("model name") or facts.get("CPU part") or "",
        "instructions": " ".join(sorted(flag for flag in flags if flag.startswith(_INSTRUCTIONS))),
        "torch": importlib.metadata.version("torch"),
    }


def computed(run_directory: Path) -> dict[str, Any]:
    """Return what training computed, in full precision, and the digest of the state that it ended with.

    Steps that were trained again after a failure count as they came out last.
    """
    steps = {row["step"]: [row["loss"], row["grad_norm"]] for row in rows(run_directory / "metrics.jsonl")}
    return {
        "loss_and_grad_norm": [steps[step] for step in sorted(steps)],
        "state_digest": _newest_manifest(run_directory)["state_digest"],
    }


def written(run_directory: Path) -> dict[str, Any]:
    """Return the keys of everything that a run has written, and the parts of its tensors."""
    manifest = _newest_manifest(run_directory)
    metrics = {tuple(row) for row in rows(run_directory / "metrics.jsonl")}
    samples = [row for file in (run_directory / "samples").rglob("*.jsonl") for row in rows(file)]
    # Agents write heartbeats when a second has passed: a short run may have ended by then.
    names = {file.name for file in run_directory.iterdir()} - {"heartbeats"}
    return {
        "run directory": sorted(names),
        "run.json": keys_of(json.loads((run_directory / "run.json").read_text())),
        "metrics.jsonl": [list(columns) for columns in sorted(metrics)],
        "samples": sorted({key for row in samples for key in row}),
        "checkpoints": sorted(folder.name for folder in (run_directory / "checkpoints").iterdir()),
        "manifest.json": keys_of(manifest, unnamed=("files", "tensors")),
        "tensors": {name: _parts(tensor) for name, tensor in manifest["tensors"].items()},
    }


def event_keys(run_directory: Path) -> dict[str, list[list[str]]]:
    """Return for each event the sets of keys that it was written with."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for file in sorted((run_directory / "events").glob("*.jsonl")):
        for row in rows(file):
            found.setdefault(row["event"], set()).add(tuple(keys_of(row)))
    return {name: [list(keys) for keys in sorted(found[name])] for name in sorted(found)}


def _newest_manifest(run_directory: Path) -> dict[str, Any]:
    newest = sorted((run_directory / "checkpoints").glob("step-*/manifest.json"))[-1]
    return dict(json.loads(newest.read_text()))


def _parts(tensor: dict[str, Any]) -> str:
    parts = " ".join(f"{chunk['offsets']}+{chunk['shape']}" for chunk in tensor["chunks"])
    return f"{tensor['dtype']} {tensor['shape']}: {parts}"


def recorded(folder: Path) -> dict[str, Any]:
    """Train all layouts in `folder`; return names of files below `recorded/` with what belongs into them.

    What was computed holds for one processor, which is named beside it; the events are those of all layouts.
    """
    pack_corpus(folder)
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        trained = train(folder, layout)
        computed_here = {"processor": processor(), **computed(trained)}
        found[f"layouts/{layout}.computed.json"] = computed_here
        found[f"layouts/{layout}.written.json"] = written(trained)
        found[f"layouts/{layout}.events.json"] = event_keys(trained)
    found["layouts/stopped.events.json"] = event_keys(stop(folder))
    return found
