"""The whole prediction of one case: memory by stage, time by part, and the rates people quote."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.flops import hardware_flops_per_token, model_flops_per_token
from orchestra.plan.cases.case import Case
from orchestra.plan.cases.stages import has_idle_stage
from orchestra.plan.costs.memory import Memory, fits, is_pressed, stage_memory
from orchestra.plan.costs.own_memory import kinds_of_layers
from orchestra.plan.costs.step_time import StepTime, step_time


@dataclass(frozen=True)
class Prediction:
    """What a case takes. MFU and HFU in PaLM's convention (see `orchestra.flops`), as shares of the peak.

    `fits`: memory suffices and every pipeline stage has something to do.
    """

    case: Case
    stages: tuple[Memory, ...]
    time: StepTime
    fits: bool
    tokens_per_s: float
    mfu: float
    hfu: float

    @property
    def peak(self) -> Memory:
        """The memory of the fullest stage, which decides whether it fits."""
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def reported_peak(self) -> Memory:
        """The memory that the trainer's benchmark would report: of the first stage, or of the fullest."""
        return self.stages[0] if self.case.framework.reports_first_stage else self.peak

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / self.case.layout.world_size


def predict(case: Case) -> Prediction:
    """Predict memory and speed, the latter also where the former does not fit."""
    time = step_time(case)
    memory = stage_memory(case, time.layer)
    if is_pressed(case, memory):
        memory, time = stage_memory(case, time.layer, is_pressed=True), step_time(case, is_pressed=True)
    rate = case.tokens_per_step / time.total
    share = rate / case.layout.world_size / case.device.peak_flops
    return Prediction(
        case=case,
        stages=memory,
        time=time,
        fits=fits(case, memory) and not has_idle_stage(case.stages),
        tokens_per_s=rate,
        mfu=share * model_flops_per_token(case.model, case.seq_len),
        hfu=share * hardware_flops_per_token(case.model, case.seq_len, kinds_of_layers(case)),
    )
