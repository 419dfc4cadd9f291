"""The compiled update: the fused kernel's numbers, one pass over the state, and two graphs for a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from conf.schema import OptimConfig
from orchestra.optim.adamw import MOMENTS, AdamW, Trained, squared_norm
from tests.support.inductor_bytes import counted_bytes

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
# Vectors, and what is no multiple of a row, are left to the fused kernel.
SHAPES = ((64, 48), (96,), (32, 7), (640, 16), (33, 3))


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@dataclass
class Training:
    """An optimizer of 16-bit parameters and their fp32 masters."""

    trained: list[Trained]
    optimizer: AdamW

    @classmethod
    def make(cls, *, is_compiled: bool) -> Training:
        generator = torch.Generator().manual_seed(0)
        trained = []
        for number, shape in enumerate(SHAPES):
            master = torch.randn(shape, generator=generator)
            trained.append(Trained(str(number), nn.Parameter(master.bfloat16()), master, 0, master.numel()))
        optimizer = AdamW(trained, OPTIM, 0, lambda *_: torch.zeros(0), is_compiled=is_compiled)
        return cls(trained, optimizer)

    def step(self, step: int, *, is_bad: bool = False) -> None:
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
        if is_bad:
            gradients[0][0, 0] = torch.inf
        norm = squared_norm(gradients).sqrt().float()
        # A loss scale, and another rate in each step.
        self.optimizer.lr = OPTIM.lr / step
        self.optimizer.begin_step(step, norm, torch.tensor(is_bad), torch.tensor(4.0))
        self.optimizer.update(self.trained, gradients, [item.parameter.detach() for item in self.trained])

    def state(self, item: Trained) -> list[Tensor]:
        return [item.master, *(self.optimizer.state[item.master][name] for name in MOMENTS)]


def test_it_follows_the_fused_kernel_by_two_graphs_whatever_the_sizes_and_steps() -> None:
    ours, expected = Training.make(is_compiled=True), Training.make(is_compiled=False)
    for step, is_bad in enumerate((False, False, True, False), 1):
        for training in (ours, expected):
            training.step(step, is_bad=is_bad)
        assert counters["stats"]["unique_graphs"] == 2, f"step {step}"
    for mine, theirs in zip(ours.trained, expected.trained, strict=True):
        for value, reference in zip(ours.state(mine), expected.state(theirs), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-7)
        assert torch.equal(mine.parameter, mine.master.bfloat16())


def test_a_step_that_is_left_out_changes_no_bit() -> None:
    ours = Training.make(is_compiled=True)
    ours.step(1)
    before = [[tensor.clone() for tensor in ours.state(item)] for item in ours.trained]
    ours.step(2, is_bad=True)
    for item, kept in zip(ours.trained, before, strict=True):
        for value, reference in zip(ours.state(item), kept, strict=True):
            assert torch.equal(value, reference)


def test_each_element_of_state_is_read_once_and_written_once() -> None:
    ours, gradient = Training.make(is_compiled=True), torch.ones(SHAPES[0]).bfloat16()
    ours.trained = ours.trained[:1]
    with counted_bytes() as counted:
        ours.optimizer.begin_step(1, torch.tensor(1.0), torch.tensor(False))
        ours.optimizer.update(ours.trained, [gradient], [ours.trained[0].parameter.detach()])
        size = ours.trained[0].master.numel()
        # 28, and the parameter's two once more, which are written in place.
        assert 30 * size <= counted() <= 30 * size + 64
