"""What the commands print that start nothing: batch scripts, plans, options, and what is told of stored runs.

Each function returns names of files below `recorded/` with what belongs into them now.
"""

from __future__ import annotations

import lzma
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goldens import RECORDED, output

STORED_RUNS = RECORDED / "runs.tar.xz"

_GPUS = ("cluster.gpus_per_node=8", "cluster.time_limit=4:00:00")
_CPUS = ("cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.time_limit=1:00:00")
SUBMITTED: dict[str, tuple[str, ...]] = {
    "gpus": (*_GPUS, "cluster.nodes=4", "cluster.partition=gpu", "cluster.account=me", "cluster.qos=high"),
    "cpus": (*_CPUS, "cluster.nodes=3"),
    "chain": (*_GPUS, "cluster.nodes=2", "cluster.requeue=chain", "cluster.exclude=[node7,node9]"),
    "never": (*_GPUS, "cluster.requeue=never", "cluster.threads_per_rank=3", "cluster.constraint=h100"),
    "image": (
        *(*_GPUS, "cluster.nodes=2", 'cluster.container.image="nvcr.io#nvidia/pytorch"'),
        "cluster.container.mounts=[/data:/data]",
    ),
    "prefix": (*_GPUS, "cluster.container.prefix='apptainer exec --nv image.sif'"),
    "setup": (
        *(*_GPUS, "cluster.nodes=2", "cluster.setup=['module load cuda','ulimit -l unlimited']"),
        *("cluster.slurm_extra.reservation=maintenance", "+cluster.slurm_extra.mem=0"),
    ),
    "spares": (*_GPUS, "cluster.nodes=4", "cluster.spare_nodes=1", "recovery.min_nodes=2"),
    "sweep": ("-m", *_CPUS, "cluster.nodes=1,2", "optim.lr=1e-4,3e-4,1e-3", "cluster.array_throttle=4"),
    # Refused with 2, each for a rule of its own.
    "refused-resources": (*_GPUS, "cluster.slurm_extra.ntasks=10"),
    "refused-layout": (*_GPUS, "parallelism.tp=3", "train.seq_len=0"),
}
PLANNED: dict[str, tuple[str, ...]] = {
    "llama_1b": ("model=llama_1b",),
    "llama3_8b-zero3": ("model=llama3_8b", "parallelism=zero3", "train.seq_len=8192", "precision=bf16"),
    "llama3_70b-experiment": ("experiment=llama3_70b", "cluster.nodes=128"),
    "gpt3_175b-tp8_pp4": ("model=gpt3_175b", "parallelism=tp8_pp4", "cluster.nodes=32", "precision=bf16"),
    "mixtral_8x7b-recompute": (
        *("model=mixtral_8x7b", "parallelism=tp8_zero3", "cluster.nodes=8", "precision=bf16"),
        *("train.recompute=full", "parallelism.sequence_parallel=true"),
    ),
    "llama3_8b-search": ("experiment=llama3_8b", "cluster.nodes=2", "--search", "--top=4"),
    "llama3_8b-goodput": ("experiment=llama3_8b", "cluster.nodes=8", "--goodput"),
    "llama3_8b-explain": ("experiment=llama3_8b", "cluster.nodes=2", "--explain=parallelism.tp"),
}
VERBS = (
    *("run", "submit", "plan", "resume", "status", "cancel", "logs", "why", "rehearse"),
    *("checkpoint ls", "checkpoint verify", "checkpoint export", "checkpoint import"),
    *("data pack", "doctor", "bench network"),
)


def submitted(folder: Path) -> dict[str, Any]:
    """Return what `submit --dry-run` prints, and with --json that of one job and of one sweep."""
    found: dict[str, Any] = {}
    for name, overrides in SUBMITTED.items():
        words = ["submit", *overrides, f"run.name={name}", "--dry-run"]
        found[f"submit/{name}.txt"] = output(folder, *words).as_text(words)
    for name in ("cpus", "sweep"):
        asked = ("submit", *SUBMITTED[name], f"run.name={name}", "--dry-run", "--json")
        found[f"submit/{name}.json"] = output(folder, *asked).as_json()
    return found


def planned(folder: Path) -> dict[str, Any]:
    """Return what `plan --json` prints."""
    return {
        f"plan/{name}.json": output(folder, "plan", *words, "--json").as_json()
        for name, words in PLANNED.items()
    }


def told_of_stored_runs(folder: Path) -> dict[str, Any]:
    """Return what is told of the stored runs, which this unpacks into `folder`."""
    with lzma.open(STORED_RUNS) as packed, tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")
    runs = sorted(path.parent.name for path in (folder / "runs").glob("*/run.json"))
    sweeps = sorted(path.parent.name for path in (folder / "runs").glob("*/sweep.json"))
    found: dict[str, Any] = {}
    for name in (*runs, *sweeps):
        found[f"status/{name}.json"] = output(folder, "status", name, "--json").as_json()
        found[f"why/{name}.json"] = output(folder, "why", name, "--json").as_json()
    for name in runs:
        found[f"checkpoint-ls/{name}.json"] = output(folder, "checkpoint", "ls", name, "--json").as_json()
    resumed = ("resume", "stopped", "train.steps=2000000", "--dry-run", "--json")
    found["resume/stopped.json"] = output(folder, *resumed).as_json()
    return found


def offered(folder: Path) -> dict[str, Any]:
    """Return the verbs, and for each its options and, where it takes a configuration, the presets."""
    listed = re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", output(folder, "--help").out, re.MULTILINE)
    options = {}
    for verb in VERBS:
        shown = output(folder, *verb.split(), "--help").out
        lines = re.findall(r"^  (-.*?)(?:  |$)", shown, re.MULTILINE)
        options[verb] = sorted({name for line in lines for name in re.findall(r"--?[a-z][\w-]*", line)})
    presets = output(folder, "run", "--help").out.partition("Presets")[2]
    groups = {}
    for group, names in re.findall(r"^  (\w+)= +((?:.+\n)(?: {8,}.+\n)*)", presets, re.MULTILINE):
        groups[group] = [name.strip() for name in names.split(",")]
    wrong = ("nonsense", "status absent", "why absent", "run train.steps=0", "plan --nonsense")
    codes = {words: output(folder, *words.split()).code for words in wrong}
    return {"offered.json": {"verbs": listed, "options": options, "presets": groups, "exit codes": codes}}


# What makes each part, and the recorded files that are its own.
PARTS: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[str, ...]]] = {
    "submit": (submitted, ("submit/*",)),
    "plan": (planned, ("plan/*",)),
    "stored": (told_of_stored_runs, ("status/*", "why/*", "checkpoint-ls/*", "resume/*")),
    "offered": (offered, ("offered.json",)),
}
