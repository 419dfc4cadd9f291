"""Which kernel computes attention, and when a system's cuDNN stands in the way of torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from conf.schema import ModelConfig
from orchestra.model.attention_backend import (
    Cudnn,
    attention_backend,
    cudnn_file,
    loaded_cudnn,
    slow_attention,
)

CPU = torch.device("cpu")
OLD = Cudnn(91002, "/opt/cuda/lib64/libcudnn.so.9")
MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 08:01 12 /usr/lib/libc.so.6
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000004000-7f0000005000 r-xp 00000000 08:01 13 /opt/cuda 12/lib64/libcudnn.so.9.10.2
7f0000006000-7f0000007000 r-xp 00000000 08:01 14 /opt/cuda 12/lib64/libcudnn_graph.so.9
"""


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_a_cudnn_from_before_its_attention_is_named_with_what_put_it_there(
    capability: tuple[int, int],
) -> None:
    slow = slow_attention(OLD, capability, "/opt/cuda/lib64")
    assert slow is not None
    assert "cuDNN 9.10.2 is loaded from /opt/cuda/lib64/libcudnn.so.9" in slow.cause
    assert "from 9.15.1 on" in slow.cause
    assert slow.advice.startswith("LD_LIBRARY_PATH=/opt/cuda/lib64 ")
    assert "unset it" in slow.advice
    without_path = slow_attention(Cudnn(91500, None), capability, None)
    assert without_path is not None
    assert "cuDNN 9.15.0 is loaded, " in without_path.cause
    assert "LD_LIBRARY_PATH" not in without_path.advice


@pytest.mark.parametrize(
    ("version", "capability"),
    [(91501, (9, 0)), (92000, (10, 0)), (91002, (8, 0)), (91002, (12, 0)), (None, (9, 0))],
)
def test_other_gpus_and_new_versions_are_not_warned_of(
    version: int | None, capability: tuple[int, int]
) -> None:
    assert slow_attention(Cudnn(version, None), capability, "/opt/cuda/lib64") is None


def test_versions_are_written_as_people_write_them() -> None:
    words = [Cudnn(version, None).words for version in (91501, 90100, 8902)]
    assert words == ["9.15.1", "9.1.0", "8.9.2"]


def test_the_file_of_cudnn_is_found_among_the_mapped_ones() -> None:
    assert cudnn_file(MAPS) == "/opt/cuda 12/lib64/libcudnn.so.9.10.2"
    assert cudnn_file("\n".join(MAPS.splitlines()[:2])) is None
    # torch tells the same version when it is asked again.
    assert loaded_cudnn() == loaded_cudnn()


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_the_kernel_that_is_told_is_the_one_that_runs(num_key_value_heads: int, with_documents: bool) -> None:
    model = ModelConfig(num_attention_heads=4, num_key_value_heads=num_key_value_heads, hidden_size=64)
    told = attention_backend(model, 32, torch.float32, CPU, with_documents=with_documents)
    query, key = torch.rand(1, 4, 32, 16), torch.rand(1, num_key_value_heads, 32, 16)
    mask = torch.zeros(1, 1, 32, 32) if with_documents else None
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=mask is None, enable_gqa=num_key_value_heads < 4
        )
    assert any(f"_scaled_dot_product_{told}_attention" in event.key for event in seen.key_averages())


def test_a_torch_that_does_not_tell_the_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        return attention_backend(ModelConfig(), 32, torch.float32, CPU, with_documents=False)

    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: 0)  # takes no enable_gqa
    assert told() == "unknown"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 77)
    assert told() == "unknown"
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert told() == "unknown"
