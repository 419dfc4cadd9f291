"""A Llama in DCP's checkpoint, named as by torchtitan or Hugging Face, becomes a folder to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from llamas import transformer
from torch import Tensor

from conf.schema import ModelConfig
from orchestra.cli.checkpoint.import_from_dcp import DcpSource
from orchestra.config.keys import shown
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.folder import open_folder
from orchestra.huggingface.hub_names import hugging_face_name
from orchestra.huggingface.llama_names import renames
from tests.support.command_line import CommandLine, orchestra
from tests.support.reference_llama import small

__all__ = ["orchestra"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL = small(vocab_size=257)
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KEYS = (*KEYS, "num_key_value_heads", "vocab_size", "tie_word_embeddings")
TITAN = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{kind}_proj": f"attention.w{kind}" for kind in "qkvo"},
    **{
        f"mlp.{kind}_proj": f"feed_forward.{name}"
        for kind, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    "lm_head": "output",
}


def described(model: ModelConfig) -> list[str]:
    return [f"model.{key}={shown(getattr(model, key))}" for key in KEYS]


def in_titan(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Return a parameter as torchtitan has it: rows of a head that are turned together lie side by side."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        width = MODEL.hidden_size // MODEL.num_attention_heads
        heads = weight.view(-1, 2, width // 2, weight.shape[1])
        weight = torch.stack((heads[:, 0], heads[:, 1]), dim=2).reshape(weight.shape)
    for ours, theirs in TITAN.items():
        name = name.replace(f"{ours}.weight", f"{theirs}.weight")
    return name, weight.clone()


@pytest.mark.parametrize("names", ["torchtitan", "hf"])
def test_a_llama_becomes_a_folder_to_start_from(tmp_path: Path, names: str, orchestra: CommandLine) -> None:
    model = MODEL if names == "torchtitan" else replace(MODEL, tie_word_embeddings=True)
    parameters = {name: value.detach() for name, value in transformer(model).named_parameters()}
    weights = {hugging_face_name(name): value for name, value in parameters.items()}
    content = {"model": {**weights, "lm_head.weight": parameters["embed_tokens.weight"]}, "optimizer": 1}
    if names == "torchtitan":
        # At the root, beside a buffer of a type that safetensors does not have.
        content = dict(in_titan(name, value) for name, value in parameters.items())
        content["freqs_cis"] = torch.zeros(4, dtype=torch.complex64)
    dcp.save(content, checkpoint_id=str(tmp_path / "dcp"))
    words = ("checkpoint", "import", "--from", "dcp", str(tmp_path / "dcp"), str(tmp_path / "llama"))
    record = orchestra.json(*words, *described(model))
    assert f"model.init_from={tmp_path}/llama" in record["overrides"]
    folder = open_folder(str(tmp_path / "llama"))
    for name, value in parameters.items():
        (chunk,) = folder.manifest.tensors[f"model.{name}"].chunks
        raw = bytearray(chunk.num_bytes)
        folder.storage.read_into(f"{folder.name}/{chunk.file}", chunk.begin, memoryview(raw))
        assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).view(value.shape), value), name
    # Nothing is left of what was written in between.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "llama"]


def test_rows_in_their_new_order_attend_as_before() -> None:
    """Meta's rotation of the old rows and Hugging Face's of the new ones give the same scores."""
    model = replace(MODEL, num_key_value_heads=MODEL.num_attention_heads)
    titan = dict(in_titan(name, value.detach()) for name, value in transformer(model).named_parameters())
    found = renames({name: ("F32", value.shape) for name, value in titan.items()}, model, "x")
    length, num_heads, width = 5, MODEL.num_attention_heads, MODEL.hidden_size // MODEL.num_attention_heads
    angles = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(width // 2) / 4))
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    inputs = torch.randn(length, MODEL.hidden_size, generator=torch.Generator().manual_seed(0))
    queries_and_keys = []
    for name in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight"):
        weight, rename = titan[name], found[name]
        new = weight.view(rename["split"]).permute(rename["order"]).reshape(weight.shape)
        old_SNH, new_SNH = ((inputs @ each.T).view(length, num_heads, width) for each in (weight, new))
        pairs = torch.view_as_complex(old_SNH.reshape(length, num_heads, width // 2, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)[:, None]).flatten(2)
        low, high = new_SNH.chunk(2, dim=-1)
        queries_and_keys.append((turned, new_SNH * cos + torch.cat((-high, low), dim=-1) * sin))
    (old_q, new_q), (old_k, new_k) = queries_and_keys
    scores = [torch.einsum("snh,tnh->nst", q, k) for q, k in ((old_q, old_k), (new_q, new_k))]
    torch.testing.assert_close(*scores)


def test_for_a_folder_that_is_not_there_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere")
    with pytest.raises(ConfigError, match=r"is no folder of this machine; give the folder"):
        DcpSource(str(tmp_path / "gone"), None, None).ask("describe")
    with pytest.raises(ConfigError, match=r"memory://gone is not there or empty; give the folder"):
        DcpSource("memory://gone", None, None).ask("describe")


def test_another_model_is_refused(tmp_path: Path, orchestra: CommandLine) -> None:
    parameters = transformer(MODEL).named_parameters()
    titan = dict(in_titan(name, value.detach()) for name, value in parameters)
    found = {name: ("F32", tuple(value.shape)) for name, value in titan.items()}

    def refusal(dtype: str = "F32", **changes: int) -> str:
        with pytest.raises(DataError) as caught:
            renames(
                {name: (dtype, shape) for name, (_, shape) in found.items()}, replace(MODEL, **changes), "x"
            )
        return str(caught.value)

    assert "lacks layers.3.input_layernorm.weight" in refusal(num_hidden_layers=4)
    assert "has layers.1.attention_norm.weight" in refusal(num_hidden_layers=1)
    assert "tok_embeddings.weight has shape [257, 48], the model has [512, 48]" in refusal(vocab_size=512)
    assert "tok_embeddings.weight is F64, expected one of F32" in refusal("F64")
    dcp = ("checkpoint", "import", "--from", "dcp")
    for words, sentence in (
        ((*dcp, "a", "b", "data=tokens"), "only the model is described here"),
        ((*dcp, "a", "b", "model.hidden=3"), "hidden_size"),
        ((*dcp, "a"), "needs a TARGET"),
        ((*dcp, "a", "model=debug"), "needs a TARGET"),
        (("checkpoint", "import", "a", "b"), "only --from dcp"),
        (("checkpoint", "import", "a"), "a is not there or empty; give a folder with config.json and"),
        (("checkpoint", "import", __file__), f"{__file__} is a file; give a folder with config.json and"),
        (("checkpoint", "import", "memory://a/b"), "memory://a/b is not there or empty"),
        ((*dcp, "a", "b"), "a is no folder of this machine"),
        ((*dcp, "a", str(tmp_path.parent), "model=debug"), "exists already and is not an empty folder"),
    ):
        assert sentence in orchestra(*words, code=2).err
