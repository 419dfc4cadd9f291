"""Attention on a GPU: flash attention over documents against the exact mask, training with both, and the
kernel that is told against the one that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import (
    Config,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    PrecisionName,
    Recompute,
    TrainConfig,
)
from orchestra.model.attention_backend import attention_backend
from orchestra.model.documents import attend_within, document_bounds, documents_for
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.blocks import compile_blocks, recompute_blocks
from orchestra.parallel.mesh import make_mesh
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from orchestra.train.trainer import announce_attention
from tests.support.called_operators import called

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SEPARATOR, BATCH, SEQUENCE, HEADS, WIDTH = 0, 2, 512, 8, 64


def needs_flash_attention() -> None:
    if torch.cuda.get_device_capability(GPU) < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0 or more")


def tokens_of(places: tuple[int, ...]) -> Tensor:
    """Return tokens [B, S]; the first sample has separators at these places, the second has none."""
    tokens = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    tokens[0, list(places)] = SEPARATOR
    return tokens


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("places", [(), (0, 511), (5, 6, 7, 300), tuple(range(0, 512, 3))])
def test_flash_attention_over_documents_is_the_exact_mask_but_for_rounding(
    key_heads: int, places: tuple[int, ...]
) -> None:
    needs_flash_attention()
    tokens = tokens_of(places)
    bounds = document_bounds(tokens, SEPARATOR)
    varying = documents_for(bounds, tokens.to(GPU), torch.bfloat16, WIDTH)
    masks = documents_for(bounds, tokens.to(GPU), torch.float32, WIDTH)
    assert (varying.dtype, masks.dtype) == (torch.int32, torch.float32)
    generator = torch.Generator(GPU).manual_seed(0)
    exact = [
        torch.randn(BATCH, SEQUENCE, heads, WIDTH, device=GPU, generator=generator).bfloat16().float()
        for heads in (HEADS, key_heads, key_heads, HEADS)
    ]
    results = []
    for dtype, documents in ((torch.float32, masks), (torch.bfloat16, varying)):
        query, key, value = (each.to(dtype, copy=True).requires_grad_() for each in exact[:3])
        out = attend_within(query, key, value, documents)
        out.backward(exact[3].to(dtype))  # type: ignore[no-untyped-call]
        results.append([out.detach(), query.grad, key.grad, value.grad])
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        # bf16 has 8 bits: each number is off by up to 2⁻⁹ of itself, and so are those it is made from.
        assert float((found.float() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("is_compiled", [False, True])
def test_16_bit_training_inside_of_documents_follows_that_of_the_cpu(is_compiled: bool) -> None:
    needs_flash_attention()

    def losses_on(device: torch.device, precision: PrecisionName) -> list[float]:
        train = TrainConfig(steps=10, seq_len=64, global_batch_size=4, micro_batch_size=2)
        config = Config(
            model=ModelConfig(),
            precision=PrecisionConfig(precision),
            # The standard library's separator is one of the model's 272 tokens.
            data=DataConfig(document_masks=True),
            train=replace(train, compile=is_compiled and device == GPU),
        )
        training = build_training(config, make_mesh(0, Layout(dp=1), device))
        losses = []
        for step in range(1, 11):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(200, config.model.vocab_size, (2, 2, 65), generator=generator)
            losses.append(float(training.step.run(step, tokens).loss))
        return losses

    expected = losses_on(CPU, PrecisionName.fp32)
    assert losses_on(GPU, PrecisionName.bf16) == pytest.approx(expected, rel=0.02)


def test_documents_found_on_the_host_make_nobody_wait_for_the_gpu() -> None:
    needs_flash_attention()
    model = Transformer(ModelConfig(), separator_id=256)
    fill_initial_values(model, 0)
    model.to(GPU, torch.bfloat16)
    tokens = torch.randint(200, 272, (2, 64))
    bounds, on_gpu = model.document_bounds(tokens), tokens.to(GPU)
    model.hidden(on_gpu, bounds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.hidden(on_gpu, bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_that_is_told_is_the_one_that_runs(dtype: torch.dtype) -> None:
    model = ModelConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    told = attention_backend(model, 256, dtype, GPU, with_documents=False)
    query = torch.rand(1, 8, 256, 64, device=GPU, dtype=dtype, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert any(f"_scaled_dot_product_{told}_attention" in event.key for event in seen.key_averages())


KERNELS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
)


class Attentions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often attention is computed; what is found in memory does not come here."""

    num = 0

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        self.num += operator.name() in KERNELS
        return operator(*arguments, **(options or {}))


def num_attentions(work: Callable[[], None], *, is_compiled: bool) -> int:
    if is_compiled:
        operators = called(work)
        return sum(operators[name] for name in KERNELS)
    with Attentions() as attentions:  # type: ignore[no-untyped-call]
        work()
    return int(attentions.num)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
def test_selective_recomputation_keeps_what_the_kernel_gives(has_documents: bool, is_compiled: bool) -> None:
    needs_flash_attention()
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(200, 272, (2, 2, 64), generator=generator).to(GPU)
    counts, gradients = {}, {}
    for kind in Recompute:
        train = TrainConfig(seq_len=64, micro_batch_size=2, recompute=kind, compile=is_compiled)
        config = Config(train=train, precision=PrecisionConfig(PrecisionName.bf16))
        model = Transformer(config.model, separator_id=256 if has_documents else None)
        fill_initial_values(model, 0)
        model.to(GPU, torch.bfloat16)
        recompute_blocks(model, config, make_mesh(0, Layout(dp=1), GPU))
        compile_blocks(model, config)
        # Compiled here.
        model(tokens, targets).backward()
        model.zero_grad()

        def work(model: Transformer = model) -> None:
            model(tokens, targets).backward()

        counts[kind] = num_attentions(work, is_compiled=is_compiled)
        found = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients[kind] = torch.cat([each.float().flatten() for each in found])
    num_layers = ModelConfig().num_hidden_layers
    assert counts == {
        Recompute.none: num_layers,
        Recompute.selective: num_layers,
        Recompute.full: 2 * num_layers,
    }
    expected = gradients[Recompute.none]
    for kind in (Recompute.selective, Recompute.full):
        assert float((gradients[kind] - expected).norm() / expected.norm()) < 0.01, kind


def test_attention_is_announced_once_in_words_and_as_an_event(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    config = Config(precision=PrecisionConfig(PrecisionName.bf16))
    announce_attention(config, GPU, EventWriter(run, "rank", 0, rank=0))
    (event,) = read_events(run)
    assert event["event"] == "attention"
    assert event["backend"] in ("cudnn", "flash", "efficient", "math")
    assert f"attention: {event['backend']}, cuDNN" in capfd.readouterr().err
