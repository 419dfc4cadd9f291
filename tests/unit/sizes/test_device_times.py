"""Kernels belong to the part that started them, whichever thread did; traces as torch's profiler writes them
on a GPU (kinds and names of events from kineto), with times in microseconds.
"""

from __future__ import annotations

from orchestra.sizes.device_times import TraceEvent, device_times
from orchestra.sizes.step_shares import MARKS, OTHER, Part, shares_of

COMPUTE, COPIES, NCCL = 7, 13, 20


def host(name: str, begin: float, end: float, correlation: int = 0, *, mark: bool = False) -> TraceEvent:
    begin_ns, end_ns = round(begin * 1e3), round(end * 1e3)
    return TraceEvent(name, begin_ns, end_ns, is_annotation=mark, correlation=correlation)


def mark(part: Part, begin: float, end: float) -> TraceEvent:
    return host(MARKS[part], begin, end, mark=True)


def kernel(name: str, begin: float, end: float, correlation: int, stream: int = COMPUTE) -> TraceEvent:
    return TraceEvent(name, round(begin * 1e3), round(end * 1e3), True, False, correlation, stream)


def shares(events: list[TraceEvent], end: float) -> dict[str, float]:
    """Return the parts' microseconds of one step that begins at 0."""
    found = device_times(events)
    total, parts, _ = shares_of([(0, round(end * 1e3))], found.parts, found.in_flight, found.computing)
    assert abs(sum(parts.values()) - total) < 1e-12
    return {name: round(seconds * 1e6, 3) for name, seconds in parts.items()}


def test_kernels_of_autograds_thread_are_the_backward_pass_though_the_host_is_long_past_it() -> None:
    events = [
        mark(Part.data, 0, 10),
        mark(Part.forward, 10, 20),
        host("aten::mm", 11, 14, correlation=2),  # an operator's own number, equal to a launch's below
        host("cudaLaunchKernel", 12, 13, correlation=1),
        # The device repeats the main thread's mark, over the kernels of the main thread alone.
        TraceEvent(MARKS[Part.forward], 13_000, 43_000, True, True, 0, COMPUTE),
        mark(Part.backward, 20, 30),
        # Autograd's thread: no mark of its own, and its kernels start after the main thread went on.
        host("autograd::engine::evaluate_function: MmBackward0", 21, 29, correlation=3),
        host("cudaLaunchKernelExC", 22, 23, correlation=2),
        host("cudaMemsetAsync", 24, 25, correlation=4),
        mark(Part.optimizer, 30, 34),
        host("cudaLaunchKernel", 31, 32, correlation=5),
        host("cudaDeviceSynchronize", 34, 120, correlation=6),
        kernel("nvjet_tst_128x256", 13, 43, 1),
        kernel("nvjet_tst_256x128", 44, 102, 2),
        kernel("Memset (Device)", 102, 104, 4),
        kernel("multi_tensor_apply_kernel", 104, 118, 5),
    ]
    assert shares(events, end=120) == {
        "data": 10,
        "forward": 30,
        "backward": 60,
        "optimizer": 14,
        "communication": 0,
        OTHER: 6,
    }


def test_kernels_of_compiled_blocks_and_recomputation_count_where_they_are_called() -> None:
    events = [
        mark(Part.forward, 0, 10),
        host("Torch-Compiled Region: 0/0", 1, 9, mark=True),
        host("cuLaunchKernelEx", 2, 3, correlation=1),
        host("cuLaunchKernel", 4, 5, correlation=2),
        mark(Part.backward, 10, 20),
        host("CompiledFunctionBackward", 11, 19),
        host("cuLaunchKernel", 12, 13, correlation=3),
        host("cuLaunchKernel", 14, 15, correlation=4),
        kernel("triton_red_fused_rms_norm_0", 3, 13, 1),
        kernel("triton_poi_fused_silu_1", 13, 33, 2),
        kernel("triton_red_fused_rms_norm_0", 33, 43, 3),  # recomputed
        kernel("triton_per_fused_backward_2", 43, 93, 4),
        kernel("triton_of_an_unseen_launch", 93, 97, 99),
    ]
    found = shares(events, end=100)
    assert (found["forward"], found["backward"], found[OTHER]) == (30, 64, 6)


def test_communication_is_exposed_where_nothing_computes_and_streams_count_once() -> None:
    events = [
        mark(Part.forward, 0, 5),
        host("cudaLaunchKernel", 1, 2, correlation=1),
        mark(Part.backward, 5, 30),
        host("cudaLaunchKernel", 6, 7, correlation=2),
        mark(Part.communication, 8, 12),
        host("cudaMemcpyAsync", 9, 10, correlation=3),
        host("cudaLaunchKernelExC", 10, 11, correlation=4),
        mark(Part.optimizer, 14, 18),  # from inside of the backward pass
        host("cudaMemcpyAsync", 15, 16, correlation=5),
        kernel("gemm", 2, 20, 1),
        kernel("gemm", 20, 60, 2),
        kernel("Memcpy DtoD (Device -> Device)", 50, 62, 3, NCCL),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 62, 90, 4, NCCL),
        kernel("Memcpy HtoD (Pinned -> Device)", 40, 80, 5, COPIES),
    ]
    found = shares(events, end=100)
    assert found == {
        "data": 0,
        "forward": 18,
        "backward": 40,
        "optimizer": 20,
        "communication": 10,
        OTHER: 12,
    }
