"""The peers of `parallel.py`: DDP, FSDP2, DTensor's tensor parallelism, accelerate, as their docs show.

Every peer begins with orchestra's own initial values and has the same AdamW groups and the same clipping, so
that the losses can be compared before the times are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import MeanLoss, PlainLlama, TransformersLoss, transformers_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from conf.schema import Config
from orchestra.model.kernels import rotate
from orchestra.model.transformer import ModelPart, Transformer, fill_initial_values
from orchestra.sizes.pipeline_schedule import pipeline_shape
from orchestra.sizes.stage_cut import stage_layers

Step = Callable[[], Tensor]
# The plain model's names for orchestra's modules.
_PLAIN = {
    "embed_tokens": "embedding",
    "lm_head": "output",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    **{f"self_attn.{name}_proj": name for name in "qkvo"},
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}


def module_of(kind: str, config: Config, device: torch.device) -> nn.Module:
    """Return one of the models, `ours`, `plain` or `transformers`, with orchestra's initial values."""
    source = Transformer(config.model)
    fill_initial_values(source, config.train.seed)
    values = source.state_dict()
    if kind == "ours":
        module: nn.Module = MeanLoss(config.model)
        module.load_state_dict(values)
    elif kind == "plain":
        module = PlainLlama(config.model)
        module.load_state_dict({_plain_name(name): value for name, value in values.items()})
    else:
        inner = transformers_llama(config.model)
        names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in values}
        inner.load_state_dict({names[name]: value for name, value in values.items()})
        module = TransformersLoss(inner)
    return module.to(device)


def _plain_name(name: str) -> str:
    for ours, plain in _PLAIN.items():
        name = name.replace(ours, plain)
    return name


def layers_of(module: nn.Module) -> Any:
    return module.inner.model.layers if isinstance(module, TransformersLoss) else module.layers


def adamw(module: nn.Module, config: Config) -> Any:
    """Return AdamW with decay for matrices only; DTensors and plain tensors in groups of their own."""
    optim = config.optim
    groups = []
    for has_decay in (True, False):
        for is_distributed in (True, False):
            found = [
                parameter
                for parameter in module.parameters()
                if (parameter.dim() >= 2) is has_decay and isinstance(parameter, DTensor) is is_distributed
            ]
            if found:
                groups.append({"params": found, "weight_decay": optim.weight_decay if has_decay else 0.0})
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def clip(module: nn.Module, limit: float) -> None:
    """Clip to a norm; torch's own function does not take DTensors and plain tensors together."""
    parameters = list(module.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) is it] for it in (True, False)]
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, limit, total)


def bare_step(module: nn.Module, tokens: Tensor, optimizer: Any, limit: float) -> Step:
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        loss = module(inputs, targets)
        loss.backward()
        clip(module, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ddp(kind: str, config: Config, device: torch.device, tokens: Tensor, *, is_sharded: bool = False) -> Step:
    """DistributedDataParallel; `is_sharded`: with torch's ZeroRedundancyOptimizer."""
    module = DistributedDataParallel(module_of(kind, config, device), gradient_as_bucket_view=True)
    if is_sharded:
        # One group: this optimizer shares out parameters, and groups of few would be shared out badly.
        optim = config.optim
        optimizer = ZeroRedundancyOptimizer(
            [
                {
                    "params": [p for p in module.parameters() if p.dim() >= 2],
                    "weight_decay": optim.weight_decay,
                },
                {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            torch.optim.AdamW,
            lr=optim.lr,
            betas=tuple(optim.betas),
            eps=optim.eps,
            fused=True,
        )
    else:
        optimizer = adamw(module, config)
    return bare_step(module, tokens, optimizer, config.optim.clip_norm or torch.inf)


def fsdp(kind: str, config: Config, device: torch.device, tokens: Tensor, *, reshards: bool) -> Step:
    """FSDP2, layer by layer; `reshards`: parameters are released behind the forward pass (ZeRO-3)."""
    module = module_of(kind, config, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    root = fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    sum_only(root)
    optimizer = adamw(module, config)
    return bare_step(module, tokens, optimizer, config.optim.clip_norm or torch.inf)


def gathered_keys(kind: str, config: Config, device: torch.device, tokens: Tensor) -> Step:
    """Sequences in as many parts as ranks: each gathers all keys and values (torch.distributed.nn) and gives
    torch's attention a mask, under DistributedDataParallel.
    """
    module = module_of(kind, config, device)
    assert isinstance(module, MeanLoss)
    rank, size = dist.get_rank(), config.train.seq_len // dist.get_world_size()
    own = torch.arange(rank * size, (rank + 1) * size, device=device)
    mask = own[:, None] >= torch.arange(config.train.seq_len, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, rotary: Any, _: Any) -> Tensor:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        k, v = (torch.cat(all_gather(each.contiguous()), dim=1).transpose(1, 2) for each in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    for layer in module.layers:
        layer.self_attn.attend = attend
    module.sequences.places = lambda *_: own
    module_on_ranks = DistributedDataParallel(module, gradient_as_bucket_view=True)
    part = tokens[:, rank * size : (rank + 1) * size + 1]
    return bare_step(
        module_on_ranks, part, adamw(module_on_ranks, config), config.optim.clip_norm or torch.inf
    )


def sum_only(module: nn.Module) -> None:
    """Have FSDP2 divide by itself: gloo cannot take averages."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)


def dtensor_tp(
    kind: str, config: Config, device: torch.device, tokens: Tensor, *, is_sequence_parallel: bool
) -> Step:
    """`parallelize_module` with the plan of torch's tutorial on tensor parallelism, with parallel loss."""
    module = module_of(kind, config, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if kind == "plain":
        module = _DTensorLoss(_parallel_plain(module, mesh, is_sequence_parallel))
    else:
        assert isinstance(module, TransformersLoss)
        module = _DTensorLoss(_parallel_transformers(module.inner, mesh, is_sequence_parallel))
    optimizer = adamw(module, config)
    return bare_step(module, tokens, optimizer, config.optim.clip_norm or torch.inf)


class _DTensorLoss(nn.Module):
    """Cross-entropy of logits that are cut by words; the backward pass stands in its context too."""

    def __init__(self, logits: nn.Module) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.logits(tokens)
        logits = (out if isinstance(out, Tensor) else out.logits).flatten(0, 1)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        return _ParallelLoss(loss)  # type: ignore[return-value]


class _ParallelLoss:
    """A loss whose backward pass runs in the context that it needs."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss

    def backward(self) -> None:
        with loss_parallel():
            self._loss.backward()

    def detach(self) -> Tensor:
        loss = self._loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


class _PlainLogits(nn.Module):
    """The plain model up to its logits."""

    def __init__(self, inner: PlainLlama) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.inner
        x = inner.embedding(tokens)
        if inner.tables is None:
            angles = torch.outer(torch.arange(tokens.shape[1]).float(), inner.frequencies).to(tokens.device)
            angles = torch.cat((angles, angles), -1)
            inner.tables = (angles.cos(), angles.sin())
        for layer in inner.layers:
            x = layer(x, *inner.tables)
        out: Tensor = inner.output(inner.norm(x))
        return out


def _ends(is_sp: bool) -> tuple[Any, Any]:
    """Return how the embedding and the output matrix are cut."""
    embedding = RowwiseParallel(
        input_layouts=Replicate(),
        output_layouts=Shard(1) if is_sp else Replicate(),
        use_local_output=not is_sp,
    )
    inputs = Shard(1) if is_sp else Replicate()
    return embedding, ColwiseParallel(input_layouts=inputs, use_local_output=False)


def _columns_in(is_sp: bool) -> Any:
    """Return how a product's result is brought back to the residual stream."""
    return RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if is_sp else RowwiseParallel()


def _parallel_plain(module: nn.Module, mesh: DeviceMesh, is_sp: bool) -> nn.Module:
    assert isinstance(module, PlainLlama)
    embedding, output = _ends(is_sp)
    plan: dict[str, Any] = {"embedding": embedding, "output": output}
    if is_sp:
        plan["norm"] = SequenceParallel()
    parallelize_module(module, mesh, plan)
    for layer in module.layers:
        of_layer: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
        of_layer |= dict.fromkeys(("o", "down"), _columns_in(is_sp))
        if is_sp:
            of_layer |= dict.fromkeys(("norm_1", "norm_2"), SequenceParallel())
        parallelize_module(layer, mesh, of_layer)
        if is_sp:
            # Once for all the products behind a norm, as PrepareModuleInput does for a module of its own.
            for norm in (layer.norm_1, layer.norm_2):
                norm.register_forward_hook(functools.partial(_gathered, mesh))
    return _PlainLogits(module)


def _gathered(mesh: DeviceMesh, _module: nn.Module, _inputs: Any, output: DTensor) -> DTensor:
    return output.redistribute(mesh, [Replicate()])


def _parallel_transformers(inner: Any, mesh: DeviceMesh, is_sp: bool) -> nn.Module:
    embedding, output = _ends(is_sp)
    plan: dict[str, Any] = {"model.embed_tokens": embedding, "lm_head": output}
    if is_sp:
        plan["model.norm"] = SequenceParallel()
    parallelize_module(inner, mesh, plan)
    names = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    for layer in inner.model.layers:
        of_layer: dict[str, Any] = dict.fromkeys(names, ColwiseParallel())
        of_layer |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), _columns_in(is_sp))
        if is_sp:
            of_layer |= {
                "input_layernorm": SequenceParallel(),
                "post_attention_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(layer, mesh, of_layer)
    return inner  # type: ignore[no-any-return]


class _StageModule(nn.Module):
    """One stage of orchestra's model, cut as orchestra cuts it, for torch's pipelines."""

    def __init__(self, config: Config, stage: int) -> None:
        super().__init__()
        self.model = Transformer(config.model)
        fill_initial_values(self.model, config.train.seed)
        layers = stage_layers(config)
        self.part = ModelPart(layers[stage], is_first=stage == 0, is_last=stage == len(layers) - 1)
        self.model.keep_only([self.part])
        self.seen = torch.zeros((config.train.micro_batch_size, config.train.seq_len), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        if self.part.is_first:
            return self.model.through(self.part, x, None)
        return self.model.through(self.part, self.seen, x)


def pipelined(config: Config, device: torch.device, tokens: Tensor) -> Step:
    """torch.distributed.pipelining: 1F1B or interleaved 1F1B, with static shapes."""
    shape, rank = pipeline_shape(config.parallelism), dist.get_rank()
    num_micro_batches = config.train.global_batch_size // config.train.micro_batch_size
    share = 1.0 / (tokens.shape[0] * config.train.seq_len)
    modules, stages = [], []
    for number in shape.stages_of(rank):
        module = _StageModule(config, number).to(device)
        hidden = torch.zeros((*module.seen.shape, config.model.hidden_size), requires_grad=True)
        given = module.seen if number == 0 else hidden
        modules.append(module)
        stages.append(
            PipelineStage(module, number, shape.num_stages, device, input_args=given, output_args=hidden)
        )
    last = modules[-1].model

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return last.loss_of(hidden, targets, share)

    schedule: Any
    if shape.num_chunks == 1:
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss_of, scale_grads=False)
    whole = nn.ModuleList(modules)
    optimizer = adamw(whole, config)
    limit = config.optim.clip_norm or torch.inf
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if rank == 0 else ()
        is_last = shape.rank_of(shape.num_stages - 1) == rank
        schedule.step(*given, **({"target": targets, "losses": losses} if is_last else {}))
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients).square()
        both = torch.stack([total, squares])
        dist.all_reduce(both)
        torch.nn.utils.clip_grads_with_norm_(whole.parameters(), limit, both[1].sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return both[0]

    return step


class OtherPeerError(ImportError):
    """A library that would be measured under the name of something that it does not do."""


def accelerated(config: Config, device: torch.device, tokens: Tensor, *, is_sharded: bool) -> Step:
    """accelerate's own loop around transformers' Llama, in DDP or in its FSDP2.

    Raises OtherPeerError where accelerate wraps the model in something else than was asked for.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if is_sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    module = module_of("transformers", config, device)
    module, optimizer = accelerator.prepare(module, adamw(module, config))
    if any(isinstance(each, FSDPModule) for each in module.modules()) is not is_sharded:
        wanted = "FSDP2" if is_sharded else "DDP"
        raise OtherPeerError(f"accelerate wraps {type(module).__name__} here, and {wanted} was asked for")
    sum_only(module)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        loss = module(inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
