"""Checkpoints that torch.distributed.checkpoint wrote become ours, damaged and hostile ones sentences."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_checkpoint import memory
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.dcp.dcp_import import answered
from checkpointing.torch_state import restore
from tests.support.pages import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    """A model with a tied weight and a buffer, of which one part is compiled."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(5, 7)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.first(inputs)) + self.last(inputs)
        return hidden


def made(seed: int, kind: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied(seed)
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = [{"params": [model.first.weight], "lr": 0.1}, {"params": [*model.parameters()][1:]}]
    return model, torch.optim.AdamW(groups, weight_decay=0.2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def request(source: object, target: object, **changes: Any) -> dict[str, Any]:
    words = {"act": "import", "source": str(source), "target": str(target)}
    return {**words, "step": None, "model": None, "model_only": False, **changes}


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    ema = {name: value + 1 for name, value in weights.items() if value.dim()}
    return {
        "model": weights,
        "optim": state,
        "ema": ema,
        "step": 3,
        "scheduler": {"last_epoch": 9, "f": print},
    }


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {**weights, "optimizer": state, "train": {"step": torch.tensor(3), "noise": torch.ones(4)}}


@pytest.mark.parametrize("laid_out", [nested, flattened])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_loop_goes_on_from_dcp_s_checkpoint_bit_for_bit(
    tmp_path: Path, kind: str, laid_out: Callable[..., dict[str, Any]]
) -> None:
    model, optimizer = made(0, kind)
    train(model, optimizer, range(3))
    dcp.save(laid_out(model, optimizer), checkpoint_id=str(tmp_path / "dcp"))
    answer = answered(request(tmp_path / "dcp", tmp_path / "ours"))
    assert (answer["step"], answer["has_optimizer"]) == (3, True)
    left_out = {nested: ["ema.* (8 tensors)", "scheduler.f"], flattened: ["train.*"]}
    assert answer["left_out"] == left_out[laid_out]
    other, its_optimizer = made(1, kind)
    extra: dict[str, Any] = {}
    assert restore(str(tmp_path / "ours"), other, its_optimizer, extra=extra) == 3
    assert extra == (
        {"step": 3, "scheduler": {"last_epoch": 9}} if laid_out is nested else {"train": {"step": 3}}
    )
    assert its_optimizer.param_groups[0]["lr"] == 0.1
    assert train(other, its_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))


def test_schedulers_go_on_with_their_lists_and_milestones(tmp_path: Path) -> None:
    def scheduled() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.SequentialLR]:
        model, optimizer = made(0)
        kinds = torch.optim.lr_scheduler
        parts: list[Any] = [kinds.ConstantLR(optimizer), kinds.MultiStepLR(optimizer, [2, 4])]
        return model, optimizer, kinds.SequentialLR(optimizer, parts, [3])

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = scheduled()
    train(model, optimizer, range(1))
    rates(optimizer, scheduler, 4)
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optim": state, "sched": scheduler.state_dict(), "a.b": {"step": 4}}
    dcp.save(content, checkpoint_id=str(tmp_path / "dcp"))
    answered(request(tmp_path / "dcp", tmp_path / "ours"))
    other, its_optimizer, its_scheduler = scheduled()
    extra: dict[str, Any] = {}
    restore(str(tmp_path / "ours"), other, its_optimizer, extra=extra)
    assert extra["a.b"] == {"step": 4}
    its_scheduler.load_state_dict(extra["sched"])
    assert rates(its_optimizer, its_scheduler, 8) == rates(optimizer, scheduler, 8)


def test_any_storage_and_the_safetensors_that_dcp_writes_are_taken(tmp_path: Path) -> None:
    model, _ = made(0)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "step-12"), save_distributed=True)
    dcp.save({name: value.clone() for name, value in model.state_dict().items()}, storage_writer=writer)
    place = memory().place
    answer = answered(request(f"file://{tmp_path}/step-12", place))
    assert (answer["step"], answer["has_optimizer"]) == (12, False)
    other, _ = made(1)
    assert restore(place, other) == 12
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        answered(request(tmp_path / "step-12", place))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    dcp.save(nested(model, optimizer), checkpoint_id=str(tmp_path / "dcp"))
    return tmp_path / "dcp"


def rewritten(folder: Path, change: Callable[[Any], object]) -> None:
    """Change DCP's metadata as somebody else could."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    changed = change(metadata)
    file.write_bytes(pickle.dumps(metadata if changed is None else changed))


def remove_a_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].chunks.pop()


def lie_about_a_size(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.first.weight"]
    entry.size = torch.Size([1 << 40, 5])
    entry.chunks[0].sizes = entry.size


def lie_about_a_shape(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.first.weight"]
    entry.size = torch.Size([5, 7])
    entry.chunks[0].sizes = entry.size


def leave_the_folder(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"


def claim_an_extension(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def name_no_place(metadata: Metadata) -> None:
    metadata.state_dict_metadata["more"] = BytesStorageMetadata()


def use_an_unknown_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].properties.dtype = torch.complex64


def shorten(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])


def garble(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: rewritten(folder, remove_a_chunk), r"hold 0 of the 35 elements of \[7, 5\]"),
        (lambda folder: rewritten(folder, lie_about_a_size), "bytes cannot hold the part"),
        (lambda folder: rewritten(folder, lie_about_a_shape), r"found torch.float32 \[7, 5\], expected"),
        (lambda folder: rewritten(folder, leave_the_folder), "'../../secret', expected one in the folder"),
        (lambda folder: rewritten(folder, claim_an_extension), "extensions .*zstd.* not read here"),
        (lambda folder: rewritten(folder, name_no_place), "more: does not say where"),
        (lambda folder: rewritten(folder, use_an_unknown_dtype), "model.first.weight is torch.complex64"),
        (lambda folder: rewritten(folder, lambda _: {"model": 1}), "holds a dict, expected DCP's Metadata"),
        (
            lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"),
            ".metadata: cut off, damaged, or no",
        ),
        (lambda folder: (folder / ".metadata").write_text("{}"), ".metadata: cut off, damaged, or no"),
        (lambda folder: (folder / ".metadata").unlink(), "has no file .metadata"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp: .*there is no such file"),
        (shorten, r"__0_0.distcp: .*cut off: it has \d+ bytes, \d+ are expected"),
        (garble, "__0_0.distcp: optim.param_groups.0.params: its bytes .* are damaged"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_in_a_sentence(
    saved: Path, tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    spoil(saved)
    with pytest.raises(CheckpointError, match=sentence):
        answered(request(saved, tmp_path / "ours"))
    assert not [*tmp_path.glob("ours/*")]


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    weights = model.state_dict()
    dcp.save({"net": weights, "ema": weights}, checkpoint_id=str(tmp_path / "two"))
    dcp.save({"model": weights, "optim": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "indices"))
    with pytest.raises(CheckpointError, match=r"net \(9 tensors\), ema \(9 tensors\): give --model KEY"):
        answered(request(tmp_path / "two", tmp_path / "ours"))
    counted = {"net": weights, "seen": torch.tensor(3)}
    dcp.save(counted, checkpoint_id=str(tmp_path / "step-4"))
    with pytest.raises(CheckpointError, match=r"net \(9 tensors\), the root \(1 tensors\): give --model KEY"):
        answered(request(tmp_path / "step-4", tmp_path / "ours"))
    with pytest.raises(CheckpointError, match="does not say its step: give --step N"):
        answered(request(tmp_path / "two", tmp_path / "ours", model="net"))
    with pytest.raises(CheckpointError, match=r"optim.state has indices .* --model-only"):
        answered(request(tmp_path / "indices", tmp_path / "ours", step=1))
    with pytest.raises(CheckpointError, match="no tensor's name begins with lib"):
        answered(request(tmp_path / "two", tmp_path / "ours", model="lib"))
    found = answered(request(tmp_path / "indices", tmp_path / "ours", step=1, model_only=True))
    assert (found["num_tensors"], found["left_out"]) == (9, ["optim.* (an optimizer)"])


class Evil:
    """What a pickle may say: any call of any function."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


class EvilState:
    """A class of DCP's, whose state is another object's call."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return MetadataIndex, ("name",), {"fqn": Evil(self._mark)}


def test_an_evil_pickle_is_named_and_not_executed(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    metadata = (saved / ".metadata").read_bytes()
    rewritten(saved, lambda _: Evil(mark))
    done = subprocess.run(
        [sys.executable, "-m", "checkpointing.dcp.dcp_import"],
        input=json.dumps(request(saved, tmp_path / "ours")),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == (
        f".metadata asks for {os.system.__module__}.system, which is none of DCP's classes: nothing of it "
        "was executed; do not trust this folder"
    )
    assert done.returncode == 3
    (saved / ".metadata").write_bytes(metadata)
    # In a value: torch's own allow-list.
    torch.save({"lr": Evil(mark)}, saved / "__0_0.distcp", pickle_protocol=2)
    size = (saved / "__0_0.distcp").stat().st_size

    def point_there(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, size

    rewritten(saved, point_there)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        answered(request(saved, tmp_path / "ours"))
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "_C"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "torch"),
        ("pathlib", "Path.home"),
        ("copyreg", "_reconstructor"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 4])
def test_only_dcp_s_own_classes_are_known(saved: Path, module: str, name: str, protocol: int) -> None:
    name_of = f"c{module}\n{name}\n" if protocol == 0 else None
    content = name_of.encode() if name_of else b"\x80\x04" + _text(module) + _text(name) + b"\x93"
    (saved / ".metadata").write_bytes(content + b"(tR.")
    with pytest.raises(CheckpointError, match=rf"asks for {module}.{name}, which is none of DCP's classes"):
        answered(request(saved, saved))


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def test_an_object_in_a_record_s_state_is_refused_too(saved: Path, tmp_path: Path) -> None:
    rewritten(saved, lambda _: EvilState(tmp_path / "executed"))
    with pytest.raises(CheckpointError, match="which is none of DCP's classes"):
        answered(request(saved, tmp_path / "ours"))
    assert not (tmp_path / "executed").exists()
