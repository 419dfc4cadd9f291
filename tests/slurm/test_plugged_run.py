"""A submitted run with somebody else's layers, data, optimizer, loss and callback goes on with its copies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sites import ROOT, TINY, Site, SubmittedRun

from checkpointing.catalog import step_name
from orchestra.data.order import read_ledger, sample_ids
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

PACKAGE = """
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, model, *, layer_number, bias=False):
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden_size)
        self.mix = nn.Linear(model.hidden_size, model.hidden_size + layer_number, bias=bias)
        self.back = nn.Linear(model.hidden_size + layer_number, model.hidden_size)

    def forward(self, x, rotary, documents):
        past = F.pad(self.norm(x), (0, 0, 1, 0))[:, :-1]
        return x + self.back(torch.relu(self.mix(past)))


class Counting:
    vocab_size, num_samples, identity = 200, 5000, "numbers from 0 on"

    def __init__(self, seq_len, *, step=1):
        self.steps = step * torch.arange(seq_len + 1)

    def sample(self, index):
        return (index + self.steps) % self.vocab_size


def optimizer(params, lr, *, momentum=0.0):
    return torch.optim.SGD(params, lr=lr, momentum=momentum)


def loss(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


class Version:
    def on_step(self, step, metrics):
        return {"version": 1}
"""
SETTINGS = (
    *("cluster.nodes=2", "cluster.spare_nodes=1", "cluster.gpus_per_node=1", "parallelism.zero=1"),
    *("train.steps=100000", "train.log_every=1", "checkpoint.every_steps=5", "run.name=plugged"),
    *("optim.target=mine.parts:optimizer", "optim.options.momentum=0.5", "train.loss=mine.parts:loss"),
    *("model.block=mine.parts:Layer", "model.block_options.bias=true", "data.source=mine.parts:Counting"),
    *("data.source_options.step=3", "data.ledger=true"),
    'train.callbacks=["mine.parts:Version"]',
    "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.05, attempt: all}]",
)


@pytest.mark.timeout(240)
def test_plug_ins_stay_what_they_were_through_a_lost_node_and_a_resume(cluster: Site) -> None:
    package = cluster.shared / "elsewhere" / "mine"
    package.mkdir(parents=True)
    package.parent.chmod(0o755)
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(PACKAGE)

    def orchestra(*words: str) -> str:
        path = {"PYTHONPATH": f"{ROOT}:{package.parent}"}
        return cluster.run(sys.executable, "-m", "orchestra", *words, timeout_s=120, **path).stdout

    facts = json.loads(orchestra("submit", *TINY, *SETTINGS, "--json"))
    run = SubmittedRun(cluster, RunDir(Path(facts["path"])), str(facts["job"]))
    run.wait_for_step(6)
    (package / "parts.py").write_text("raise RuntimeError('edited meanwhile')\n")
    lost = run.fail_node(1)
    run.wait_for_attempt(1)
    run.wait_for_steps(3)
    orchestra("cancel", "plugged")
    # A job that lost a node is given back by scancel.
    assert (cluster.ended(run.job), run.status()["code"]) == ("CANCELLED", 75), run.logs()
    step = run.step()
    # Until Slurm has found out that the node is gone it would give it to the next job.
    cluster.heal(lost)

    more = (f"train.steps={step + 5}", "--accept-jump", "--json")
    job = str(json.loads(orchestra("resume", "plugged", *more))["job"])
    run.assert_job_ends("COMPLETED", job=job)
    rows = read_metrics(run.dir)
    assert [row["step"] for row in rows] == list(range(1, step + 6))
    assert {row["version"] for row in rows} == {1}
    assert {row["mfu"] for row in rows} == {None}
    assert (run.dir.plugins / "mine" / "parts.py").read_text() == PACKAGE
    manifest = json.loads((run.dir.checkpoints / step_name(step + 5) / "manifest.json").read_text())
    facts = manifest["state"]["config"]
    assert facts["model.block"] == "mine.parts:Layer"
    assert facts["data.source_identity"] == "numbers from 0 on, 5000 samples of 200 words"
    assert "model.layers.0.mix.bias" in manifest["tensors"]
    # The order is orchestra's own: every sample where a run without a failure has it.
    ids = read_ledger(run.dir)
    size = len(ids[1])
    expected = sample_ids(0, size * (step + 5), num_samples=5000, seed=0).tolist()
    assert [sorted(ids[number]) for number in sorted(ids)] == [
        sorted(expected[begin : begin + size]) for begin in range(0, len(expected), size)
    ]
