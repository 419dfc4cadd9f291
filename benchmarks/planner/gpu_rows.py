"""Predicts what orchestra itself was measured at on one H200 on 2026-11-22, with what its kernels moved then,
and on H100s on 2026-11-26 and 27, as it is.

    python benchmarks/planner/gpu_rows.py

Nothing is fitted to a row. Two rates come from the first day's traces: of bandwidth
(`memory_passes.STREAM_SHARE`) and of products whose tiles and waves are full (`kernels.product_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.plan.assemble import case_of, for_planning
from orchestra.plan.case import PlanCase
from orchestra.plan.frameworks import Passes
from orchestra.plan.predict import predict
from orchestra.sizes.units import GIB

# The loss was never compiled: its chunks' matrices were added in fp32 (12 bytes), gradients were copied or
# added in each micro-batch, and the optimizer made fp32 copies of gradients and copied masters; nothing hid
# an update on the host.
OLD = Passes(
    compiled_loss=44,
    eager_loss=44,
    chunk=12,
    gradient=6,
    update=12,
    repeats_attention=True,
    updates_late=False,
    keeps_fp8_weights=False,
)
# A trial: the old loss under torch.compile reads and writes fp32 logits, cast before and after.
OLD_COMPILED_LOSS = replace(OLD, compiled_loss=24)
SHAPES = {
    "8B8": "model=llama3_8b model.num_hidden_layers=8 train.seq_len=8192 train.micro_batch_size=1",
    "llama_1b": "model=llama_1b train.seq_len=4096 train.micro_batch_size=4",
    "llama_125m": "model=llama_125m train.seq_len=2048 train.micro_batch_size=16",
    "gpt2_xl": "model=gpt2_xl train.seq_len=1024 train.micro_batch_size=4 train.recompute=full",
    "qwen3_moe": "model=qwen3_30b_a3b model.num_hidden_layers=4 train.seq_len=4096 train.micro_batch_size=4",
    "mixtral": "model=mixtral_8x7b model.num_hidden_layers=2 train.seq_len=4096 train.micro_batch_size=2",
}
SEQUENCES = {"8B8": 4, "llama_1b": 16, "llama_125m": 64, "gpt2_xl": 32, "qwen3_moe": 16, "mixtral": 8}
# The device that all of 2026-11-22 was measured on.
FIRST_DAY = "h200"
# 256 MiB of fp32 logits.
OLD_CHUNK = {"8B8": 512, "llama_1b": 512, "llama_125m": 1280, "gpt2_xl": 1280}


@dataclass(frozen=True)
class GpuRow:
    """What was measured; memory where it was read. `passes`: what the kernels moved; None: what they move.
    `host_s`: what the host took for a block then; None: what it takes.
    """

    shape: str
    overrides: str
    tokens_per_s: float
    memory_gib: float | None = None
    chunk: int | None = None
    passes: Passes | None = OLD
    hardware: str = FIRST_DAY
    host_s: float | None = None


def today(
    shape: str,
    overrides: str,
    tokens_per_s: float,
    memory_gib: float | None,
    passes: Passes | None = None,
) -> GpuRow:
    """Return a row of an H100, as the code is."""
    return GpuRow(shape, overrides, tokens_per_s, memory_gib, passes=passes, hardware="h100")


COMPILED, FP8 = "train.compile=true", "train.compile=true precision=fp8"
EARLIER = (
    GpuRow("8B8", "train.compile=false", 30155, 53.9),
    GpuRow("8B8", COMPILED, 31470, 53.9),
    GpuRow("8B8", COMPILED, 35640, 61.2, chunk=8192),
    GpuRow("8B8", COMPILED, 36221, chunk=8192, passes=OLD_COMPILED_LOSS),
    GpuRow("8B8", f"{COMPILED} train.recompute=selective", 29832),
    GpuRow("8B8", f"{COMPILED} train.recompute=full", 26916),
    GpuRow("8B8", FP8, 35261),
    GpuRow("8B8", FP8, 42085, chunk=8192, passes=OLD_COMPILED_LOSS),
    GpuRow("8B8", f"{FP8} precision.fp8_scaling=row", 42279, chunk=8192),
    GpuRow("llama_1b", "train.compile=false", 49797, 39.2),
    GpuRow("llama_1b", COMPILED, 54150, 39.2),
    GpuRow("llama_1b", COMPILED, 62306, 57.7, chunk=16384, passes=OLD_COMPILED_LOSS),
    GpuRow("llama_1b", FP8, 45155),
    GpuRow("llama_125m", COMPILED, 371160, 11.9),
    GpuRow("llama_125m", COMPILED, 399269, 23.6, chunk=32768),
    GpuRow("gpt2_xl", "train.compile=false", 30953, 25.1),
    GpuRow("gpt2_xl", "train.compile=false parallelism.offload=optimizer", 14984, 7.6),
    today("8B8", COMPILED, 38286, 52.4),
    # Attention was computed again, and not kept in memory.
    today("8B8", f"{COMPILED} train.recompute=selective", 36537, None, Passes(repeats_attention=True)),
    today("8B8", FP8, 45255, 54.5),
    today("8B8", f"{FP8} precision.fp8_output=true", 48519, 57.8),
    today("llama_1b", COMPILED, 64896, 40.2),
    today("llama_1b", FP8, 70798, 39.5),
    today("llama_125m", COMPILED, 476589, 12.8),
    today("qwen3_moe", COMPILED, 117635, 58.7),
    # Half an hour earlier: rows of the embedding took 1.2 % of the step that they do not take now.
    today("mixtral", COMPILED, 86695, 52.2),
)
# 2026-11-27, the median of two H100s where both had it.
NEWEST = (
    today("8B8", COMPILED, 38089, 52.4),
    today("8B8", f"{COMPILED} train.recompute=selective", 37271, 49.6),
    today("8B8", f"{COMPILED} train.recompute=full", 31688, 44.4),
    today("8B8", FP8, 45797, 53.4),
    today("8B8", f"{FP8} precision.fp8_output=true", 49924, 56.6),
    today("8B8", f"{FP8} precision.fp8_scaling=row", 43193, 52.9),
    today("llama_1b", COMPILED, 63603, 40.2),
    # Took 36.0 GiB; since then the norms' outputs are kept, 1.0 GiB of them.
    today("llama_1b", FP8, 72555, None),
    today("qwen3_moe", COMPILED, 115398, 58.7),
    today("mixtral", COMPILED, 86206, 52.2),
    # It waits for the host. Attention was wrapped as what draws random numbers, which took 0.65 ms a block.
    replace(today("gpt2_xl", COMPILED, 23619, 24.6), host_s=3.5e-3),
)
ROWS = (*EARLIER, *NEWEST)


def case(row: GpuRow) -> PlanCase:
    one_gpu = f"cluster.hardware={row.hardware} cluster.nodes=1 cluster.gpus_per_node=1"
    batch = f"train.global_batch_size={SEQUENCES[row.shape]}"
    precision = "" if "precision=" in row.overrides else "precision=bf16"
    words = f"{one_gpu} {SHAPES[row.shape]} {batch} {precision} {row.overrides}".split()
    found = case_of(compose(for_planning(words), Situation("plan")).config)
    if row.host_s is not None:
        then = replace(found.framework, host_compiled_s=(row.host_s, row.host_s))
        found = replace(found, framework=then)
    if row.passes is None:
        return found
    found = replace(found, framework=replace(found.framework, passes=row.passes))
    if row.hardware != FIRST_DAY:
        return found
    options = replace(found.options, loss_chunk_tokens=row.chunk or OLD_CHUNK[row.shape])
    return replace(found, options=options)


def main() -> None:
    for row in ROWS:
        here = case(row)
        speed = predict(here).tokens_per_s
        # The loss kept its logits in fp32 also where blocks were compiled.
        before = replace(here, options=replace(here.options, is_compiled=False))
        peak = predict(before if row.hardware == FIRST_DAY else here).reported_peak.total / GIB
        memory = f"{peak / row.memory_gib - 1:+.1%}" if row.memory_gib else ""
        chunk = f" chunk {row.chunk}" if row.chunk else ""
        loss = " loss compiled" if row.passes is OLD_COMPILED_LOSS else ""
        name = f"{row.hardware} {row.shape} {row.overrides}{chunk}{loss}"
        off = f"{speed / row.tokens_per_s - 1:>+8.1%}"
        print(f"{name:<80}{row.tokens_per_s:>9,.0f}{speed:>9,.0f}{off}{memory:>8}")


if __name__ == "__main__":
    main()
