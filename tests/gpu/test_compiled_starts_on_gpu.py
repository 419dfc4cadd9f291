"""A further start on a GPU finds its compiled blocks on the disk, whatever they compute again."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Recompute
from tests.unit.parallel.test_compiled_blocks import assert_found_on_disk


@pytest.mark.parametrize("recompute", Recompute)
def test_a_further_start_finds_blocks_on_the_disk(recompute: Recompute) -> None:
    assert_found_on_disk(torch.device("cuda", 0), recompute)
