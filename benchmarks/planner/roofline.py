"""The baseline of the planner's score: a roofline with eight constants, as one writes it in an afternoon.

Compute at a share of the peak, tensor-parallel traffic at one bandwidth inside and one between nodes, a cost
per layer, a bubble, and the gradients' reduction at one bandwidth.
"""

from __future__ import annotations

from fit import Constants

from orchestra.plan.case import PlanCase
from orchestra.sizes.flops import model_flops_per_token, num_parameters

ROOFLINE: Constants = {
    "product_share": 0.5,
    "inside_bytes_per_s": 200e9,
    "between_bytes_per_s": 30e9,
    "collective_s": 1e-4,
    "layer_s": 1e-3,
    "hand_over_s": 1e-3,
    "reduction_bytes_per_s": 50e9,
    "step_s": 2e-2,
}


def roofline_tokens_per_s(case: PlanCase, constants: Constants) -> float:
    """Return tokens per second and device."""
    model, mesh, tokens = case.model, case.layout, case.tokens
    flops = model_flops_per_token(model, case.seq_len) * tokens.count / (mesh.tp * mesh.pp)
    layers = model.num_hidden_layers / mesh.pp
    micro = flops / (case.device.peak_flops * constants["product_share"]) + layers * constants["layer_s"]
    if mesh.tp > 1:
        inside = mesh.tp <= case.devices_per_node
        rate = constants["inside_bytes_per_s" if inside else "between_bytes_per_s"]
        moved = 8 * tokens.count * model.hidden_size * 2 * (mesh.tp - 1) / mesh.tp
        micro += layers * (moved / rate + 8 * constants["collective_s"])
    if mesh.pp > 1:
        micro += constants["hand_over_s"]
    gradients = 8 * num_parameters(model) / (mesh.tp * mesh.pp) * (mesh.dp - 1) / mesh.dp
    step = (case.accumulation + mesh.pp - 1) * micro + gradients / constants["reduction_bytes_per_s"]
    return case.tokens_per_step / (step + constants["step_s"]) / mesh.world_size
