"""The energy counter of a GPU, as NVML tells it."""

from __future__ import annotations

import time

import pytest
import torch

from orchestra.train.watch.energy import NvmlCounter, joules_between


def test_a_gpu_that_computes_uses_energy() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    counter = NvmlCounter(device)
    before, began = counter.millijoules(), time.monotonic()
    matrix = torch.ones(4096, 4096, device=device)
    while time.monotonic() < began + 1.0:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
    power_w = joules_between(before, counter.millijoules()) / (time.monotonic() - began)
    # Between what one draws idle and more than any is built for.
    assert 20.0 < power_w < 3000.0
