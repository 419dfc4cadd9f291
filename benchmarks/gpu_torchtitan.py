"""The contestant `torchtitan` of `gpu.py`: its own Llama 3, as its trainer trains it on one GPU."""

from __future__ import annotations

from typing import Any

import torch
from gpu_contestants import Built, LeftOutError, initial_values, nothing, plain_step, their_names
from torch import Tensor

from conf.model_schema import Family
from conf.schema import Config, ModelConfig

_INSTALL = "pip install torchtitan==0.2.2"


def torchtitan_step(_: str, config: Config, device: torch.device, dtype: torch.dtype) -> Built:
    """Build torchtitan's Llama under autocast with fp32 weights, its blocks and its loss compiled by its own
    functions.

    On one GPU its trainer does not apply fully_shard (`ParallelDims.fsdp_enabled` needs several ranks): bf16
    comes from `maybe_enable_amp`, which is the autocast below. Its default recomputes activations
    (`activation_checkpoint.mode`); here none are, as with the other peers. Its clipping is torch's, and its
    optimizer torch's fused AdamW, both as in `plain_step`.
    """
    _refuse(config.model)
    try:
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.config import JobConfig
        from torchtitan.models.llama3.infra.parallelize import apply_compile
    except ImportError as error:
        raise LeftOutError(f"torchtitan cannot be imported ({error}): {_INSTALL}") from error
    inner = _llama(config, device)
    job = JobConfig()
    job.compile.enable = True
    apply_compile(inner, job.compile)
    sum_of_losses = build_cross_entropy_loss(job)

    def logits_of(inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            return inner(inputs)  # type: ignore[no-any-return]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return sum_of_losses(logits, targets) / targets.numel()  # type: ignore[no-any-return]

    return plain_step(inner, logits_of, config, device, loss_of), nothing


def _refuse(model: ModelConfig) -> None:
    """Raise LeftOutError for what torchtitan's Llama 3 has not."""
    width = model.hidden_size // model.num_attention_heads
    lacks = {
        f"the family {model.family.name}": model.family is not Family.llama,
        "experts": bool(model.num_experts),
        "tied embeddings": model.tie_word_embeddings,
        "norms of heads": model.qk_norm,
        "latent attention": model.kv_lora_rank is not None,
        "heads of another width than hidden_size / num_attention_heads": model.head_dim not in (None, width),
    }
    found = [what for what, is_so in lacks.items() if is_so]
    if found:
        raise LeftOutError(f"torchtitan's Llama 3 has not: {', '.join(found)}")


def _llama(config: Config, device: torch.device) -> Any:
    """Return torchtitan's model in fp32 with orchestra's initial values, in its order of rotary pairs."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    model, scaling = config.model, config.model.rope_scaling
    arguments = TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_hidden_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        # It rounds a multiple of 8/3 of the hidden size up to a multiple of the former: to exactly ours.
        multiple_of=model.intermediate_size,
        ffn_dim_multiplier=model.intermediate_size / int(8 * model.hidden_size / 3),
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        # It always scales; a factor of 1 changes nothing.
        rope_scaling_args=RoPEScalingArgs(
            scaling.factor if scaling.enabled else 1.0,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_position_embeddings,
        ),
        max_seq_len=config.train.seq_len,
    )
    with device:
        inner = Transformer(arguments)
    values = their_names(initial_values(model, device))
    inner.load_state_dict(Llama3StateDictAdapter(arguments, None).from_hf(values))
    inner.train()
    return inner
