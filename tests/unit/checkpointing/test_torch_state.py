"""A plain torch loop's state: one process here; processes that are killed, and other world sizes, below."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as SplitDim
from torch.nn.parallel import DistributedDataParallel

from checkpointing import catalog
from checkpointing.checkpoint_errors import MismatchError, NoCheckpointError, SaveFailedError, StorageError
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.storage import open_storage
from checkpointing.storage.local import LocalStorage
from checkpointing.torch_state import LoopCheckpointer, loop_checkpointer, meeting, restore, save
from launchers.host_network import free_port
from tests.support.command_line import CommandLine, orchestra
from tests.support.pages import DOCS, ROOT, blocks

__all__ = ["orchestra"]


def network(seed: int = 0, width: int = 7) -> nn.Sequential:
    """A network with buffers and a tied weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 5), nn.Linear(5, width)
    )
    model[3].weight = model[0].weight
    return model


def adamw(model: nn.Module, **options: object) -> torch.optim.AdamW:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "lr": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["adamw", "sgd", "bf16"])
def test_a_restored_loop_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(seed)
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, adamw(model, amsgrad=True)

    model, optimizer = made(0)
    assert restore(str(tmp_path), model, optimizer) is None
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.05
    if kind == "bf16":
        # The state in another dtype than the parameter's, which torch itself would round.
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            state.update({key: value.double() + 1e-12 for key, value in state.items() if value.dim()})
        model.to(torch.float64).to(torch.float32)
    save(str(tmp_path), model, optimizer, 3, extra={"epoch": 2})
    other, its_optimizer = made(1)
    extra = {"epoch": 0, "kept": True}
    assert restore(str(tmp_path), other, its_optimizer, extra=extra) == 3
    assert extra == {"epoch": 2, "kept": True}
    assert its_optimizer.param_groups[0]["lr"] == 0.05
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(optimizer.state[one], its_optimizer.state[two])
    if kind != "bf16":
        assert train(other, its_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), other.buffers(), strict=True))


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value.dtype == two[key].dtype, key
        assert torch.equal(value, two[key]), key


def test_names_hold_not_indices_and_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = adamw(model)
    with LoopCheckpointer(str(tmp_path), model, optimizer) as checkpointer:
        for step in range(1, 5):
            train(model, optimizer, range(step, step + 1))
            assert checkpointer.save(step, wait=False)
    # Three are kept; none was skipped, and the last one was waited for.
    assert catalog.committed_steps(open_storage(str(tmp_path))) == [2, 3, 4]
    (file,) = (tmp_path / "step-00000004").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    other = network(1)
    turned = torch.optim.AdamW(
        [group | {"params": group["params"][::-1]} for group in adamw(other).param_groups[::-1]]
    )
    assert restore(str(tmp_path), other, turned) == 3
    assert "the checkpoint of step 4 was skipped" in caplog.text
    train(other, turned, range(4, 5))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    file.unlink()
    for manifest in tmp_path.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(NoCheckpointError, match="step 4"):
        restore(str(tmp_path), other, turned)


def test_what_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = network()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    save(str(tmp_path), model, optimizer, 1)
    with pytest.raises(MismatchError, match=r"the checkpoint has F32 \[7, 5\], wanted is F32 \[8, 5\]"):
        restore(str(tmp_path), network(width=8))
    deeper = nn.Sequential(*network(), nn.Linear(7, 7))
    with pytest.raises(MismatchError, match=r"2 only here: 4.bias, 4.weight"):
        restore(str(tmp_path), deeper)
    with pytest.raises(MismatchError, match=r"2 groups of .* this one 1"):
        restore(str(tmp_path), model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(MismatchError, match="make the optimizer from the parameters of this model"):
        save(str(tmp_path), network(), optimizer, 2)
    with pytest.raises(MismatchError, match="extra is not JSON"):
        save(str(tmp_path), model, optimizer, 2, extra={"weights": torch.ones(2)})
    save(str(tmp_path), model, None, 2)
    with pytest.raises(MismatchError, match="optimizer=None"):
        restore(str(tmp_path), model, optimizer)
    assert restore(str(tmp_path), model) == 2


def test_a_scheduler_goes_on_with_the_milestones_that_it_had(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 11])
    save(
        str(tmp_path),
        model,
        optimizer,
        1,
        extra={"scheduler": scheduler.state_dict(), "odd": {1: {"a": [{2: 3}]}}},
    )
    extra: dict[str, object] = {}
    restore(str(tmp_path), model, optimizer, extra=extra)
    assert extra["odd"] == {1: {"a": [{2: 3}]}}
    other = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [5])
    other.load_state_dict(extra["scheduler"])
    assert other.milestones == scheduler.milestones
    endless: list[object] = []
    endless.append(endless)
    for wrong in ({"endless": endless}, {"score": 10**400}):
        with pytest.raises(MismatchError, match="extra"):
            save(str(tmp_path), model, optimizer, 2, extra=wrong)
    with pytest.raises(MismatchError, match=r"extra\['by'\] has the key \(1, 2\); keys are text or whole"):
        save(str(tmp_path), model, optimizer, 2, extra={"by": {(1, 2): 3}})


def test_a_save_that_failed_is_told_once_and_the_next_ones_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left")

    model = network()
    optimizer = adamw(model)
    with LoopCheckpointer(str(tmp_path), model, optimizer) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "create", full)
            assert checkpointer.save(1, wait=False)
            with pytest.raises(SaveFailedError, match=r"step 1 .*no space left"):
                checkpointer.save(2, wait=False)
            with pytest.raises(SaveFailedError, match=r"step 3 .*no space left"):
                checkpointer.save(3)
        # The optimizer gets its state: all agree anew on who writes what.
        train(model, optimizer, range(1))
        assert checkpointer.save(4)
        assert checkpointer.save(5, wait=False)
    assert catalog.committed_steps(open_storage(str(tmp_path))) == [4, 5]


@pytest.mark.parametrize("failing", range(1, 4))
def test_every_rank_learns_that_a_save_was_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Ranks are threads here. Rank 0 alone writes the manifest, so nobody else can know by itself."""
    store, this = dist.HashStore(), threading.local()  # type: ignore[attr-defined]
    monkeypatch.setattr(loop_checkpointer, "meet", lambda *_: Peers(this.rank, 2, store, 20.0))
    put: Callable[..., None] = LocalStorage.put

    def refused(self: LocalStorage, path: str, content: bytes) -> None:
        if f"step-{failing:08d}" in path:
            raise StorageError("no space left")
        put(self, path, content)

    monkeypatch.setattr(LocalStorage, "put", refused)

    def loop(rank: int) -> list[int]:
        this.rank, told, model = rank, [], network()
        with LoopCheckpointer(str(tmp_path), model, None) as checkpointer:
            for step in range(1, 5):
                try:
                    checkpointer.save(step)
                except SaveFailedError as error:
                    told.append(error.step)
        return told

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(loop, range(2))) == [[failing], [failing]]


def test_a_second_save_of_a_step_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    for _ in range(3):
        save(str(tmp_path), network(), None, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def steps_in(folder: Path) -> list[int]:
    return catalog.committed_steps(open_storage(str(folder)))


def test_steps_are_not_counted_anew_beside_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be the first to go, and a restart would begin with the later ones."""
    model = network()
    for step in (100, 200, 300):
        save(str(tmp_path), model, None, step)
    # What this process has saved itself is its own affair; what it saved last stays.
    save(str(tmp_path), model, None, 10)
    assert 10 in steps_in(tmp_path)
    # Another process.
    monkeypatch.setattr(loop_checkpointer, "_known_steps", {})
    there = steps_in(tmp_path)
    with pytest.raises(
        MismatchError, match=r"has step 300, from which this loop did not go on.*another path"
    ):
        save(str(tmp_path), model, None, 20)
    assert restore(str(tmp_path), model) == 300
    with pytest.raises(MismatchError, match=r"has step 300"):
        save(str(tmp_path), model, None, 20)
    assert steps_in(tmp_path) == there
    # A later step that a restore found damaged is passed over.
    (part,) = (tmp_path / "step-00000300").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert restore(str(tmp_path), model) == 200
    save(str(tmp_path), model, None, 210)
    assert 210 in steps_in(tmp_path)


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: int) -> None:
    with pytest.raises(MismatchError, match=f"step={step}: expected a whole number"):
        save(str(tmp_path), network(), None, step)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), RuntimeError("of the loop")])
def test_whatever_ends_the_loop_the_save_under_way_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    create = LocalStorage.create

    def slow(*arguments: object) -> object:
        time.sleep(0.3)
        return create(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "create", slow)

    def left() -> None:
        with LoopCheckpointer(str(tmp_path), network(), None) as checkpointer:
            checkpointer.save(1, wait=False)
            raise error

    with pytest.raises(type(error)):
        left()
    assert steps_in(tmp_path) == [1]


def test_the_best_are_kept_by_the_score_in_extra(tmp_path: Path) -> None:
    options = Options(keep_last=1, keep_best=1)
    with LoopCheckpointer(str(tmp_path), network(), None, options) as checkpointer:
        for step, score in enumerate((9.0, 0.1, 5.0, math.nan), 1):
            checkpointer.save(step, {"score": score})
    assert steps_in(tmp_path) == [2, 4]


class WithExtraState(nn.Module):
    """Hands out a copy, which a restore would fill in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 3.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seen)


def test_what_no_restore_could_fill_is_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), WithExtraState())
    with pytest.raises(MismatchError, match=r"model\.1\._extra_state is a copy .* put it into a buffer"):
        save(str(tmp_path), model, None, 1)
    assert steps_in(tmp_path) == []


def test_numbers_that_are_not_finite_come_back_in_extra(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    given = {"scheduler": scheduler.state_dict(), "loss": [math.nan, -math.inf], 3: math.inf}
    save(str(tmp_path), model, optimizer, 1, extra=given)
    extra: dict[str | int, object] = {}
    restore(str(tmp_path), model, optimizer, extra=extra)  # type: ignore[arg-type]
    assert repr(extra) == repr(given)


def test_what_a_newer_version_wrote_is_neither_passed_over_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    for step in (1, 2):
        save(str(tmp_path), model, None, step)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "schema_version": document["schema_version"] + 1}))
    told = r"step-00000002/manifest.json: .* of a newer orchestra.*an older step has to be asked for"
    with pytest.raises(NoCheckpointError, match=told):
        restore(str(tmp_path), model)
    monkeypatch.setattr(loop_checkpointer, "_known_steps", {})
    for step in (3, 4):
        save(str(tmp_path), model, None, step)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_a_group_meets_at_its_first_rank_s_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR is that of global rank 0's machine, whichever group it is."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for first, address in ((0, "localhost"), (2, "127.0.0.1")):
        monkeypatch.setattr(dist, "get_global_rank", lambda _, __, first=first: first)
        assert meeting._own_address(None) in (address, "::1")


def test_ddp_saves_for_a_plain_model_and_partial_sums_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = network()
        wrapped = DistributedDataParallel(model)
        optimizer = adamw(wrapped)
        train(wrapped, optimizer, range(2))
        save(str(tmp_path / "saved"), wrapped, optimizer, 2)
        mesh = init_device_mesh("cpu", (1,))
        partial = nn.Module()
        partial.register_buffer("sum", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        with pytest.raises(MismatchError, match=r"model.sum has the placements .*redistribute"):
            save(str(tmp_path / "other"), partial, None, 1)
        empty = nn.Module()
        empty.register_buffer("none", DTensor.from_local(torch.ones(0, 3), mesh, [SplitDim(0)]))
        save(str(tmp_path / "empty"), empty, None, 1)
        assert restore(str(tmp_path / "empty"), empty) == 1
    finally:
        dist.destroy_process_group()
    other = network(1)
    its_optimizer = adamw(other)
    assert restore(str(tmp_path / "saved"), other, its_optimizer) == 2
    assert train(other, its_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))


def start(folder: Path, world_size: int, steps: int) -> list[subprocess.Popen[str]]:
    """Start the ranks of the page's loop; what rank 0 prints is piped."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "my_loop.py", "checkpoints", str(steps)],
            cwd=folder,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


_ABORTED_BY_GLOO = "terminate called without an active exception"


def printed(ranks: list[subprocess.Popen[str]]) -> str:
    """Return what rank 0 printed to its end. gloo may abort a rank that has done everything and is about to
    end, as the page says, in its own words: whether all was done is seen from what is printed and saved.
    """
    try:
        # Importing torch takes each of three ranks a minute on a machine with ten times its work.
        ends = [rank.communicate(timeout=200) for rank in ranks]
        for rank, (_, errors) in zip(ranks, ends, strict=True):
            is_aborted = rank.returncode == -signal.SIGABRT and _ABORTED_BY_GLOO in errors
            assert rank.returncode == 0 or is_aborted, errors
    finally:
        for rank in ranks:
            rank.kill()
    return ends[0][0]


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", output)}


# The loop's save, and what writes the same with torch alone.
SAVE = "        save(path, model, optimizer, step, extra=extra)\n"
SAVE_WITH_DCP = """\
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state, "step": step, **extra}
        dcp.save(content, checkpoint_id=f"dcp/step-{step}")
"""
IMPORTS = """\
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
"""


@pytest.mark.timeout(600)
def test_the_page_s_loop_is_killed_and_goes_on_with_other_numbers_of_ranks(
    tmp_path: Path, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = blocks(DOCS / "library.md", "python")
    assert SAVE in source
    program = source.replace(SAVE, SAVE + SAVE_WITH_DCP).replace(
        "import torch\n", f"import torch\n{IMPORTS}", 1
    )
    (tmp_path / "my_loop.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    ranks = start(tmp_path, 2, 100000)
    assert ranks[0].stdout is not None
    try:
        next(line for line in ranks[0].stdout if line.startswith("step 8 "))
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    storage = open_storage("checkpoints")
    saved = max(catalog.committed_steps(storage))
    with_dcp = max(int(file.parent.name[5:]) for file in Path("dcp").glob("step-*/.metadata"))
    assert saved >= with_dcp >= 5
    orchestra("checkpoint", "import", "--from", "dcp", f"dcp/step-{with_dcp}", "imported")
    imported = catalog.read_manifest(open_storage("imported"), with_dcp)
    assert imported.state_digest == catalog.read_manifest(storage, with_dcp).state_digest
    on_three = printed(start(tmp_path, 3, saved + 5))
    assert f"begins after step {saved}, {24 * saved} samples" in on_three
    assert max(catalog.committed_steps(storage)) == saved + 5
    Path("checkpoints").rename("restored")
    Path("imported").rename("checkpoints")
    alone = printed(start(tmp_path, 1, saved + 5))
    assert f"begins after step {with_dcp}, {24 * with_dcp} samples" in alone
    parts, whole = losses(on_three), losses(alone)
    assert sorted(parts) == list(range(saved + 1, saved + 6))
    assert sorted(whole) == list(range(with_dcp + 1, saved + 6))
    assert max(catalog.committed_steps(open_storage("checkpoints"))) == saved + 5
    assert parts == pytest.approx({step: whole[step] for step in parts}, rel=1e-4)
