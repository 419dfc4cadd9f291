"""What a micro-batch does with tensors as large as the weights: products, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.schema import Config, Family, ModelConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training

_aten = torch.ops.aten
# Few tokens: what an activation or a chunk of logits holds is smaller than any matrix.
TOKENS, HIDDEN, WORDS = 8, 64, 96
MODEL = ModelConfig(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=WORDS,
    max_position_embeddings=64,
)
SMALLEST = HIDDEN * HIDDEN
# They read or write a table's few rows, or nothing at all.
OF_ROWS = {_aten.embedding.default, _aten.index_add_.default}
PRODUCTS = {_aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm_.default}


class PassesOverWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that read or write memory as large as a matrix of the model."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        made = operator(*arguments, **(options or {}))
        tensors = [leaf for leaf in tree_leaves((arguments, options, made)) if isinstance(leaf, Tensor)]
        is_view = operator.is_view or operator in (_aten._unsafe_view.default, _aten.detach.default)
        if not is_view and any(tensor.numel() >= SMALLEST for tensor in tensors):
            self.found[operator] += 1
        return made


def passes_of_the_second_micro_batch(model: ModelConfig, precision: PrecisionName) -> Counter[Any]:
    size = TrainConfig(seq_len=TOKENS, global_batch_size=2, micro_batch_size=1)
    config = Config(model=model, precision=PrecisionConfig(name=precision), train=size)
    mesh = make_mesh(0, Layout(dp=1), torch.device("cpu"))
    training = build_training(config, mesh)
    passes = PassesOverWeights()
    stage = training.parallelized.stage
    for index in range(2):
        stage.begin(is_first=index == 0, is_last=index == 1)
        tokens = torch.randint(0, WORDS, (1, TOKENS + 1))
        # The second one adds to what the first one has left.
        with passes if index else PassesOverWeights():
            training.parallelized.model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert len(stage.finish()) == len(training.parallelized.trained)
    return passes.found


@pytest.mark.parametrize("precision", [PrecisionName.fp32, PrecisionName.bf16])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
def test_products_alone_read_and_write_what_is_as_large_as_a_weight(
    precision: PrecisionName, tied: bool
) -> None:
    found = passes_of_the_second_micro_batch(replace(MODEL, tie_word_embeddings=tied), precision)
    num_matrices = 2 * 7 + 1
    assert found[_aten.addmm_.default] >= num_matrices, "each gradient is added inside of its product"
    assert set(found) <= PRODUCTS | OF_ROWS, found


def test_a_model_with_biases_and_positions_makes_no_pass_either() -> None:
    model = replace(MODEL, family=Family.gpt)
    found = passes_of_the_second_micro_batch(model, PrecisionName.fp32)
    # The rows of the first positions are added to the table of positions.
    assert set(found) <= PRODUCTS | OF_ROWS, found


def test_gradients_in_fp32_of_products_in_16_bits_cost_one_sum_each() -> None:
    """On CPU no product of 16-bit numbers adds to fp32."""
    found = passes_of_the_second_micro_batch(MODEL, PrecisionName.bf16_fp32_grad)
    assert set(found) <= PRODUCTS | OF_ROWS | {_aten.add_.Tensor}, found
    assert found[_aten.add_.Tensor] == 2 * 7 + 1
