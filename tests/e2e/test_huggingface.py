"""From a trained run to Hugging Face and back into a new run, by the commands a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from commands import events_of, orchestra, run_of, train

from conf.schema import DataConfig
from orchestra.data.source import open_source
from orchestra.run.metrics_file import read_metrics

SEQUENCE, BATCH = 48, 4
COMMON = (
    f"train.seq_len={SEQUENCE}",
    f"train.global_batch_size={BATCH}",
    "wandb.mode=disabled",
    "cluster.device=cpu",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a trained run, `source`, whose shape has everything a Llama can have."""
    place = tmp_path_factory.mktemp("work")
    shape = (
        "model.tie_word_embeddings=true",
        "model.rope_theta=5000.0",
        "model.rope_scaling.enabled=true",
        "model.rope_scaling.original_max_position_embeddings=32",
        "model.num_hidden_layers=2",
    )
    steps = ("train.steps=6", "checkpoint.every_steps=3", "optim.lr=3e-3")
    train(place, "source", *shape, *steps, *COMMON, "cluster.gpus_per_node=2")
    return place


def first_batch(seed: int) -> torch.Tensor:
    """Return the tokens [B, S + 1] that a run with this seed trains on first."""
    source = open_source(DataConfig(), SEQUENCE)
    tokens = torch.empty((BATCH, SEQUENCE + 1), dtype=torch.int64)
    for row, sample in enumerate(source.ids_at(0, BATCH, seed)):
        source.read(int(sample), tokens[row].numpy())
    return tokens


def evaluated(weights: Path, tokens: torch.Tensor) -> float:
    """Return the loss of exported weights as transformers computes it, in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights, dtype=torch.float32, local_files_only=True
    )
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize(("dtype", "num_ranks"), [("fp32", 1), ("bf16", 2)])
def test_a_run_begins_where_the_exported_weights_stand(folder: Path, dtype: str, num_ranks: int) -> None:
    weights = folder / f"weights-{dtype}"
    orchestra(folder, "checkpoint", "export", "source", "--to", weights.name, "--dtype", dtype)
    found = json.loads(orchestra(folder, "checkpoint", "import", weights.name, "--json").stdout)
    name = f"from-{dtype}"
    settings = ("train.steps=1", "train.seed=7", f"cluster.gpus_per_node={num_ranks}")
    run = train(folder, name, *found["overrides"], *settings, *COMMON)
    expected = evaluated(weights, first_batch(seed=7))
    assert read_metrics(run)[0]["loss"] == pytest.approx(expected, rel=1e-6)
    trained = read_metrics(run_of(folder, "source"))
    assert expected < trained[0]["loss"] - 0.2, "the weights are trained ones"
    (event,) = events_of(run, "weights_loaded")
    assert event["place"] == str(weights)
    assert event["bytes_read"] == found["num_parameters"] * (4 if dtype == "fp32" else 2)


def test_weights_of_another_model_are_refused_before_anything_exists(folder: Path) -> None:
    orchestra(folder, "checkpoint", "export", "source", "3", "--to", "weights-3")
    done = orchestra(folder, "run", "model.init_from=weights-3", "run.name=none", *COMMON, code=2)
    assert "add model.num_hidden_layers=2 model.rope_theta=5000.0" in done.stderr
    assert not (folder / "runs" / "none").exists()
