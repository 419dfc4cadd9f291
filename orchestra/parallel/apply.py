"""The ordered list of what is done to a single-device model to train it on a mesh. A feature is one more
line.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from conf.schema import Config
from orchestra.model.transformer import Transformer
from orchestra.optim.adamw import Trained
from orchestra.parallel.gradients import GradientBuckets, Gradients, PlainGradients
from orchestra.parallel.mesh import Mesh
from orchestra.precision.policy import Policy, policy


@dataclass(frozen=True)
class Parallelized:
    """A model ready to train, its parameters with their masters, and the keeper of its gradients."""

    model: Transformer
    trained: list[Trained]
    gradients: Gradients


def parallelize(model: Transformer, config: Config, mesh: Mesh) -> Parallelized:
    """Apply precision, compilation and data parallelism to a freshly initialised model. *Collective*.

    The order matters: masters are taken before the parameters are rounded, blocks are compiled in their final
    dtype, and gradients are hooked last.
    """
    precision = policy(config.precision)
    trained = split_masters(model, precision)
    compile_blocks(model, config)
    gradients = keep_gradients(trained, precision, config, mesh.dp_group)
    return Parallelized(model, trained, gradients)


def split_masters(model: Transformer, precision: Policy) -> list[Trained]:
    """Keep fp32 masters and round the model's own parameters to the policy's dtype, where the two differ."""
    if precision.parameter is precision.master:
        return [Trained(name, parameter, parameter) for name, parameter in model.named_parameters()]
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(precision.parameter)
    return [Trained(name, parameter, masters[name]) for name, parameter in model.named_parameters()]


def compile_blocks(model: Transformer, config: Config) -> None:
    """Compile each block in place (torch.compile); equal blocks share one compilation."""
    if config.train.compile:
        for layer in model.layers:
            layer.compile()


def keep_gradients(
    trained: list[Trained], precision: Policy, config: Config, dp_group: dist.ProcessGroup | None
) -> Gradients:
    """Choose who accumulates and reduces the gradients; alone in the master's dtype, autograd does."""
    if dp_group is None and precision.gradient is precision.parameter is precision.master:
        return PlainGradients(trained)
    bucket_bytes = int(config.parallelism.bucket_mib * 2**20)
    return GradientBuckets(trained, precision.gradient, bucket_bytes, dp_group)


def copy_masters(trained: list[Trained]) -> None:
    """Round the updated masters back into the model's parameters, where the two differ."""
    pairs = [(item.parameter, item.master) for item in trained if item.parameter is not item.master]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
