"""What a small model found for large ones: the overrides that carry a run's values over. Pure.

Whoever tells how a sweep ended asks, of its best member.
"""

from __future__ import annotations

from conf.schema import Config, Parametrization
from orchestra.sizes.flops import head_dim


def carried_over(config: Config) -> str | None:
    """Return the overrides for a larger model, which name this one's sizes as those that muP counts from;
    None where the run has no parametrization that carries anything over.
    """
    model, optim = config.model, config.optim
    if optim.parametrization is not Parametrization.mup:
        return None
    mup, latent = optim.mup, model.qk_nope_head_dim + model.qk_rope_head_dim
    values = {
        "optim.parametrization": "mup",
        "optim.mup.base_hidden": mup.base_hidden or model.hidden_size,
        "optim.mup.base_layers": mup.base_layers or model.num_hidden_layers,
        "optim.mup.base_head_dim": mup.base_head_dim
        or (head_dim(model) if model.kv_lora_rank is None else latent),
        "optim.mup.embedding_rate": mup.embedding_rate,
        "optim.lr": optim.lr,
        "optim.weight_decay": optim.weight_decay,
        "model.init_std": model.init_std,
    }
    written = (f"{value:g}" if isinstance(value, float) else str(value) for value in values.values())
    return " ".join(f"{key}={value}" for key, value in zip(values, written, strict=True))
