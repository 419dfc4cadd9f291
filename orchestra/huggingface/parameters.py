"""The parameters of our Llama by name and shape, in our names and in Hugging Face's. Integers and text."""

from __future__ import annotations

from conf.schema import ModelConfig
from orchestra.flops import attention_width, head_dim

# What a checkpoint calls the parameters of the model: this and the parameter's own name.
CHECKPOINT_PREFIX = "model."
_OUTPUT = "lm_head.weight"


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape, in a Llama's own order; a tied output matrix is left out."""
    hidden, wide = model.hidden_size, model.intermediate_size
    query, key_value = attention_width(model), model.num_key_value_heads * head_dim(model)
    of_layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes[_OUTPUT] = (model.vocab_size, hidden)
    return shapes


def hugging_face_name(parameter: str) -> str:
    """Return what Hugging Face calls a parameter: the output matrix lies outside of `model`."""
    return parameter if parameter == _OUTPUT else f"model.{parameter}"


def is_superfluous(name: str, model: ModelConfig) -> bool:
    """Whether a folder may hold this tensor although the model has no such parameter: the output matrix that
    is tied, and the frequencies that old versions stored.
    """
    return name.endswith(".rotary_emb.inv_freq") or (model.tie_word_embeddings and name == _OUTPUT)
