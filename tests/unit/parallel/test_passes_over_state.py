"""What an update does with the state: each element of it is read once and written once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    StateDType,
    TrainConfig,
)
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training

TOKENS, WORDS, BLOCK = 8, 96, 1024
# What a block of one thread takes: a gradient, a master, two moments and a parameter.
CACHE_BYTES = 20 * BLOCK
MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=WORDS,
)
CONFIG = Config(
    model=MODEL,
    # One unit of all parameters.
    parallelism=ParallelismConfig(bucket_mib=16.0),
    train=TrainConfig(seq_len=TOKENS, global_batch_size=1, micro_batch_size=1),
)
READS_NOTHING = {torch.ops.aten.detach.default, torch.ops.aten.new_empty.default}
WRITES_ONLY = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}


class BytesOfState(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operators read and write in given memory, and the largest other tensor.

    What one block touches stays in the cache: it is read from there again.
    """

    def __init__(self, memory: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._cached: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.read = self.written = self.largest_other = 0

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        made = operator(*arguments, **(options or {}))
        if operator.is_view or operator in READS_NOTHING:
            return made
        for number, argument in enumerate(operator._schema.arguments):
            if argument.kwarg_only:
                given = (options or {}).get(argument.name)
            else:
                given = arguments[number] if number < len(arguments) else None
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given):
                if isinstance(tensor, Tensor):
                    self._count(tensor, is_written, not (is_written and operator in WRITES_ONLY))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor, is_written=False, is_read=False)
        return made

    def _count(self, tensor: Tensor, is_written: bool, is_read: bool) -> None:
        if tensor.untyped_storage().data_ptr() in self._memory:
            place = (tensor.data_ptr(), tensor.nbytes)
            self.read += is_read * (place not in self._cached) * tensor.nbytes
            self.written += is_written * tensor.nbytes
            self._cached[place] = None
            self._cached.move_to_end(place)
            while sum(size for _, size in self._cached) > CACHE_BYTES:
                self._cached.popitem(last=False)
        else:
            self.largest_other = max(self.largest_other, tensor.numel())


@pytest.mark.parametrize(
    ("precision", "moments", "read", "written"),
    [
        # torch's kernel scales fp32 gradients where they lie.
        (PrecisionName.fp32, StateDType.fp32, 4 + 4 + 8, 4 + 4 + 8),
        (PrecisionName.bf16, StateDType.fp32, 2 + 4 + 8, 4 + 8 + 2),
        (PrecisionName.bf16, StateDType.bf16, 2 + 4 + 4, 4 + 4 + 2),
    ],
)
def test_each_element_of_state_is_read_once_and_written_once(
    precision: PrecisionName, moments: StateDType, read: int, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.optim.adamw.ROUNDED_CPU", BLOCK // torch.get_num_threads())
    optim = OptimConfig(state_dtype=moments)
    config = replace(CONFIG, precision=PrecisionConfig(name=precision), optim=optim)
    training = build_training(config, make_mesh(0, Layout(dp=1), torch.device("cpu")))
    stage, optimizer = training.parallelized.stage, training.optimizer
    stage.begin(is_first=True, is_last=True)
    tokens = torch.randint(0, WORDS, (1, TOKENS + 1))
    training.parallelized.model(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = stage.finish()
    optimizer.begin_step(1, torch.ones(()), torch.tensor(False))
    state = [moment for of_master in optimizer.state.values() for moment in of_master.values()]
    for item in training.parallelized.trained:
        state += [item.master, item.parameter]
    counted = BytesOfState({tensor.untyped_storage().data_ptr() for tensor in [*state, *gradients]})
    with counted:
        stage.update(optimizer.update)
    num_elements = sum(item.master.numel() for item in training.parallelized.trained)
    assert counted.read == read * num_elements
    assert counted.written == written * num_elements
    assert counted.largest_other <= BLOCK
