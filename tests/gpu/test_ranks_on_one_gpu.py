"""Ranks that share a GPU (`cluster.share_devices`): over NCCL every layout trains as one rank does, a killed
and a stopped rank cost nothing but time, and a saved state goes on with another layout. With an old NCCL
two layouts train over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from orchestra.parallel.shared_devices import LEAST_NCCL, NCCL, nccl_version
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from tests.e2e.commands import events_of, orchestra, processes_of, run_of

DEVICE = "cuda"
STEPS = 10
COMMON = (
    *("model=debug", "model.num_hidden_layers=2", "train.seq_len=64", "train.log_every=1"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", f"train.steps={STEPS}"),
    # The rate must not depend on the number of steps: a run that is resumed begins with fewer.
    *("optim=adamw_constant", "optim.warmup_steps=1", "optim.lr=1e-3"),
    *(f"cluster.device={DEVICE}", "cluster.share_devices=true", "cluster.peak_tflops=1"),
    "wandb.mode=disabled",
)
SEQUENCE_PARALLEL = ("parallelism.tp=2", "parallelism.sequence_parallel=true")
LAYOUTS: dict[str, tuple[str, ...]] = {
    **{f"zero-{stage}": ("cluster.gpus_per_node=2", f"parallelism.zero={stage}") for stage in range(4)},
    "hybrid": ("cluster.gpus_per_node=4", "parallelism.zero=3", "parallelism.shard_degree=2"),
    "tp": ("cluster.gpus_per_node=2", "parallelism.tp=2"),
    "tp-sequence": ("cluster.gpus_per_node=2", *SEQUENCE_PARALLEL),
    "cp": ("cluster.gpus_per_node=2", "parallelism.cp=2", "parallelism.zero=1"),
    "cp-exchanging": ("cluster.gpus_per_node=2", "parallelism.cp=2", "parallelism.cp_method=ulysses"),
    "pp": ("cluster.gpus_per_node=2", "parallelism.pp=2", "train.micro_batch_size=1"),
    "pp-split": ("cluster.gpus_per_node=2", "parallelism.pp=2", "parallelism.schedule=zero_bubble"),
    "pp-tp-sequence": ("cluster.gpus_per_node=4", "parallelism.pp=2", *SEQUENCE_PARALLEL),
    "zero-3-tp-sequence": ("cluster.gpus_per_node=4", "parallelism.zero=3", *SEQUENCE_PARALLEL),
}
SAVES = ("checkpoint.every_steps=3", "checkpoint.async_save=false")
# Ranks that share a device start one after the other on it.
LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def has_new_nccl() -> bool:
    found = nccl_version()
    return found is not None and found[:2] >= LEAST_NCCL


@pytest.fixture
def new_nccl() -> None:
    if not has_new_nccl():
        pytest.skip("needs NCCL 2.30 or newer, to take several ranks on one GPU (docs/gpus.md)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-gpu")


def command(folder: Path, verb: str, *arguments: str) -> None:
    """Run a command that sees one GPU, to its good end."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    orchestra(folder, verb, *arguments, extra={"CUDA_VISIBLE_DEVICES": first}, limit_s=LIMIT_S)


def train(folder: Path, name: str, *overrides: str) -> RunDir:
    command(folder, "run", f"run.name={name}", *COMMON, *overrides)
    return run_of(folder, name)


def losses(run: RunDir) -> list[float]:
    return [float(row["loss"]) for row in read_metrics(run)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of one rank."""
    run = train(folder, "alone", "cluster.gpus_per_node=1")
    assert events_of(run, "devices_shared") == []
    return losses(run)


def assert_shared(run: RunDir, num_ranks: int, backend: str) -> None:
    (event, *_) = events_of(run, "devices_shared")
    assert (event["ranks"], event["backend"]) == (num_ranks, backend)


@pytest.mark.usefixtures("new_nccl")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_over_nccl_trains_as_one_rank(folder: Path, alone: list[float], name: str) -> None:
    run = train(folder, name, *LAYOUTS[name])
    assert losses(run) == pytest.approx(alone, rel=1e-5)
    assert_shared(run, 4 if "gpus_per_node=4" in LAYOUTS[name][0] else 2, NCCL)


@pytest.mark.usefixtures("new_nccl")
def test_compiled_16_bit_ranks_follow_one(folder: Path, alone: list[float]) -> None:
    words = ("precision=bf16", "train.compile=true", "parallelism.zero=3", "cluster.gpus_per_node=2")
    assert losses(train(folder, "compiled", *words)) == pytest.approx(alone, rel=0.02)


@pytest.mark.usefixtures("new_nccl")
@pytest.mark.parametrize("name", ["zero-3", "cp", "pp", "pp-tp-sequence"])
def test_a_killed_and_a_stopped_rank_cost_nothing_but_time(
    folder: Path, alone: list[float], name: str
) -> None:
    faults = "{at_step: 4, rank: 1, fault: sigkill}, {attempt: 1, at_step: 8, rank: 0, fault: sigstop}"
    run = train(folder, f"{name}-faults", *LAYOUTS[name], *SAVES, f"recovery.inject=[{faults}]")
    assert losses(run) == pytest.approx(alone, rel=1e-5)
    assert [event["step"] for attempt in (1, 2) for event in events_of(run, "restored", attempt)] == [3, 6]
    (hang,) = events_of(run, "hang_detected", 1)
    assert (hang["rank"], hang["state"]) == (0, "T")
    assert processes_of(run) == []


@pytest.mark.usefixtures("new_nccl")
def test_a_saved_state_goes_on_with_another_layout(folder: Path, alone: list[float]) -> None:
    train(folder, "saved", *LAYOUTS["zero-3"], "train.steps=5")
    further = ("cluster.gpus_per_node=4", *SEQUENCE_PARALLEL, "parallelism.zero=1")
    command(folder, "resume", "saved", f"train.steps={STEPS}", *further)
    assert losses(run_of(folder, "saved")) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", ["zero-2", "zero-3-tp-sequence"])
def test_gloo_carries_a_layout_where_nccl_is_old(folder: Path, alone: list[float], name: str) -> None:
    if has_new_nccl():
        pytest.skip("needs an NCCL before 2.30: this one takes several ranks on one GPU itself")
    run = train(folder, f"{name}-gloo", *LAYOUTS[name])
    assert losses(run) == pytest.approx(alone, rel=1e-5)
    assert_shared(run, 4 if "gpus_per_node=4" in LAYOUTS[name][0] else 2, "gloo")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_memory_that_micro_batches_may_take(folder: Path, ranks: int) -> None:
    words = (f"cluster.gpus_per_node={ranks}", "train.micro_batch_size=auto", "train.steps=1")
    run = train(folder, f"memory-{ranks}", *words)
    (choice,) = events_of(run, "micro_batch_chosen")
    total = torch.cuda.get_device_properties(0).total_memory
    assert choice["limit_bytes"] == pytest.approx(0.93 * total / ranks, rel=1e-3)
    assert choice["size"] == 8 // ranks
