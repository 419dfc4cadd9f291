"""Models with experts, norms of heads and latent attention: the same logits in transformers' hands and ours,
whoever wrote the folder; and what has no such form is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llamas import save, transformer
from safetensors.torch import load_file, save_file
from torch import nn

from checkpointing.peers import Peers
from checkpointing.shards import whole
from checkpointing.storage.local import LocalStorage
from conf.schema import ModelConfig, MoeBalance, ScoringFunc
from orchestra.config.compose import compose
from orchestra.errors import DataError
from orchestra.huggingface.config_json import ARCHITECTURES, Architecture, config_document, model_of
from orchestra.huggingface.export import ExportRequest, plan_export, write_export
from orchestra.huggingface.folder import SINGLE_FILE, differences, open_folder, overrides_for
from orchestra.huggingface.hub_names import bias_shapes, parameter_shapes
from orchestra.model.transformer import Transformer
from orchestra.train.starting_point import load_weights
from tests.support.reference_llama import small
from tests.support.reference_mixtures import DEEPSEEK_V3, MIXTRAL, QWEN3, QWEN3_MOE, reference_mixture

TOKENS = torch.arange(2 * 40).reshape(2, 40) * 7 % 97
FAMILIES = {
    "mixtral": replace(MIXTRAL, moe_balance=MoeBalance.aux),
    "qwen3": QWEN3,
    "qwen3-moe": replace(QWEN3_MOE, moe_balance=MoeBalance.aux, first_k_dense_replace=1),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-plain-queries": replace(DEEPSEEK_V3, q_lora_rank=None, n_group=1, topk_group=1),
}
MODELS = [pytest.param(model, id=name) for name, model in FAMILIES.items()]


def with_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give routers biases that change what is chosen, gains that are no ones; return the biases."""
    generator = torch.Generator().manual_seed(5)
    biases = {name: value for name, value in model.named_buffers() if name.endswith("_bias")}
    with torch.no_grad():
        for value in (*biases.values(), *(each for each in model.parameters() if each.dim() == 1)):
            value.add_(torch.randn(value.shape, generator=generator) * 0.2)
    return biases


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits  # type: ignore[no-any-return]


def filled(place: Path, model: ModelConfig) -> Transformer:
    """Return our model with a folder's weights, read as a rank reads them."""
    ours = Transformer(replace(model, init_from=str(place)))
    biases = {name: value for name, value in ours.named_buffers() if name.endswith("_bias")}
    tensors = {**{name: each.detach() for name, each in ours.named_parameters()}, **biases}
    shards = [whole(f"model.{name}", tensor.fill_(torch.nan)) for name, tensor in tensors.items()]
    evidence = load_weights(ours.config, "broadcast", shards, Peers.alone(), None)
    assert evidence["bytes_read"] == sum(tensor.nbytes for tensor in tensors.values())
    return ours


def exported(place: Path, model: ModelConfig, ours: Transformer, **wanted: Any) -> Path:
    manifest = save(place, ours)
    plan = plan_export(manifest, model, ExportRequest(target=place / "out", **wanted))
    write_export(LocalStorage(place), manifest, plan)
    return place / "out"


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_what_is_exported_and_so_do_we(model: ModelConfig, tmp_path: Path) -> None:
    ours = transformer(model)
    with_biases(ours)
    out = exported(tmp_path, model, ours, max_file_bytes=50_000)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs, info = load(out, local_files_only=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.testing.assert_close(logits_of(theirs), logits_of(ours), rtol=1e-5, atol=2e-5)
    found = open_folder(str(out))
    assert differences(model, found.model) == differences(found.model, model) == []
    shapes = {name: tuple(each.shape) for name, each in ours.named_parameters()}
    assert list(parameter_shapes(model).items()) == list(shapes.items())
    assert found.num_parameters == sum(each.numel() for each in ours.parameters())
    again = filled(out, model)
    for name, parameter in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


@pytest.mark.parametrize("is_stacked", [False, True], ids=["each-expert", "stacked"])
@pytest.mark.parametrize("model", MODELS)
def test_what_transformers_writes_gives_the_same_logits(
    model: ModelConfig, is_stacked: bool, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    # The bytes of text have as many words.
    model = replace(model, vocab_size=257)
    theirs: Any = reference_mixture(model)
    with_biases(theirs)
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="40KB", save_original_format=not is_stacked)
    found = open_folder(str(folder))
    assert differences(model, found.model) == []
    torch.testing.assert_close(logits_of(filled(folder, model)), logits_of(theirs), rtol=1e-5, atol=1e-5)
    # The overrides that `orchestra checkpoint import` prints make this very model.
    config = compose(overrides_for(found)).config
    assert differences(config.model, model) == differences(model, config.model) == []
    assert bias_shapes(config.model) == bias_shapes(model)


@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda kind: kind.model_type)
def test_keys_that_are_absent_mean_what_they_mean_to_transformers(kind: Architecture) -> None:
    named = {"model_type": kind.model_type, "architectures": [kind.class_name]}
    written = transformers.AutoConfig.for_model(kind.model_type).to_dict()
    assert model_of(named, "config.json", "m") == model_of({**written, **named}, "config.json", "m")


def test_biases_stay_fp32_and_are_zero_where_the_run_had_none(tmp_path: Path) -> None:
    model = replace(DEEPSEEK_V3, moe_balance=MoeBalance.none)
    out = exported(tmp_path, model, transformer(model), dtype="BF16")
    stored = load_file(out / SINGLE_FILE)
    biases = {name: tensor for name, tensor in stored.items() if name.endswith("_bias")}
    assert len(biases) == model.num_hidden_layers - 1
    assert all(bias.dtype == torch.float32 and not bias.any() for bias in biases.values())
    assert {tensor.dtype for name, tensor in stored.items() if name not in biases} == {torch.bfloat16}
    # A run that would drop them is told so.
    assert differences(model, open_folder(str(out)).model) == [
        ("model.moe_balance", MoeBalance.none, MoeBalance.bias)
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"moe_balance": MoeBalance.bias}, r"Mixtral.*model\.moe_balance=aux or none \(here"),
        ("mixtral", {"norm_topk_prob": False}, r"norm_topk_prob=True \(here model\.norm_topk_prob=False"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "Qwen3-MoE.*intermediate_size=0"),
        ("qwen3-moe", {"scoring_func": ScoringFunc.sigmoid}, "scoring_func=softmax"),
        ("deepseek-v3", {"shared_expert_intermediate_size": 25}, "multiple of the experts' width 24"),
        (
            "deepseek-v3",
            {"num_experts": 4, "n_group": 4, "topk_group": 2},
            "DeepSeek-V3 with.* in 4 groups",
        ),
        (
            "llama",
            {"hidden_size": 50, "head_dim": 16},
            "Llama with model.hidden_size=50, which is no mul",
        ),
        ("deepseek-v3", {"num_experts": 0}, r"experts beside latent attention \(here model.num_experts=0"),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        config_document(replace({**FAMILIES, "llama": small()}[name], **changes), "F32", None)


def test_groups_that_are_all_chosen_from_are_written_as_one_and_mean_the_same() -> None:
    model = replace(DEEPSEEK_V3, n_group=4, topk_group=4, init_std=1.5)
    document = config_document(model, "F32", None)
    assert (document["n_group"], document["topk_group"], document["initializer_range"]) == (1, 1, 1.0)
    again = model_of(document, "config.json", "again")
    assert differences(model, again) == []
    assert differences(replace(model, topk_group=2), again) != []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096, but orchestra's Mixtral"),
        ("mixtral", {"num_local_experts": 10**9}, "at most 65536"),
        ("mixtral", {"num_local_experts": 60_000}, "too few for 60000 experts"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("qwen3", {"layer_types": ["sliding_attention"]}, "'full_attention' only"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=1 only"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=True only"),
        ("deepseek-v3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("deepseek-v3", {"n_group": 3}, "n_group=3 and topk_group=2 of 8 experts"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads=2, but latent attention"),
        ("deepseek-v3", {"first_k_dense_replace": 3}, "at least one is a mixture"),
    ],
)
def test_settings_that_ours_does_not_have_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = FAMILIES[name]
    out = exported(tmp_path, model, transformer(model))
    document = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**document, **changes}))
    with pytest.raises(DataError, match=message):
        open_folder(str(out))


def test_an_expert_that_is_missing_or_of_another_type_is_named(tmp_path: Path) -> None:
    model = FAMILIES["qwen3-moe"]
    out = exported(tmp_path, model, transformer(model))
    tensors = load_file(out / SINGLE_FILE)
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.bfloat16)}, out / SINGLE_FILE)
    with pytest.raises(DataError, match=rf"{name} is BF16, other experts of its layer are F32"):
        open_folder(str(out))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, out / SINGLE_FILE)
    with pytest.raises(DataError, match=rf"tensors are missing: {name}"):
        open_folder(str(out))


def test_layers_that_predict_further_tokens_may_be_in_the_file(tmp_path: Path) -> None:
    out = exported(tmp_path, DEEPSEEK_V3, transformer(DEEPSEEK_V3))
    tensors = load_file(out / SINGLE_FILE)
    last = f"model.layers.{DEEPSEEK_V3.num_hidden_layers}"
    save_file({**tensors, f"{last}.eh_proj.weight": torch.ones(3)}, out / SINGLE_FILE)
    assert open_folder(str(out)).num_parameters == sum(
        each.numel() for each in transformer(DEEPSEEK_V3).parameters()
    )
    assert differences(small(), open_folder(str(out)).model)
