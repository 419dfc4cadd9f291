"""Folders of weights as strangers leave them: read when whole, refused with words when not, never run."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpointing.storage.local import LocalStorage
from conf.schema import Config, ModelConfig
from orchestra.config.compose import compose
from orchestra.errors import DataError
from orchestra.huggingface.folder import (
    INDEX,
    SINGLE_FILE,
    differences,
    init_from_problems,
    open_folder,
    overrides_for,
    read_header,
)
from tests.support.reference_llama import MODELS, SCALED, reference_llama, small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as transformers writes it, one file."""
    reference_llama(small()).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def check_refused(folder: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_folder(str(folder))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_shard_size", ["50GB", "30KB"])
def test_what_transformers_saves_is_read_with_every_tensor(
    model: ModelConfig, max_shard_size: str, tmp_path: Path
) -> None:
    theirs = reference_llama(model)
    theirs.save_pretrained(tmp_path / "llama", max_shard_size=max_shard_size)
    found = open_folder(str(tmp_path / "llama"))
    assert differences(found.model, model) == []
    assert found.model.max_position_embeddings == model.max_position_embeddings
    state = theirs.state_dict()
    for name, tensor in found.manifest.tensors.items():
        (chunk,) = tensor.chunks
        raw = (tmp_path / "llama" / chunk.file).read_bytes()[chunk.begin : chunk.begin + chunk.num_bytes]
        weight = state[name.removeprefix("model.") if "lm_head" in name else name]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(tensor.shape), weight)
    assert found.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_configurations_of_older_versions_mean_the_same(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "dtype", "head_dim", "mlp_bias", "tie_word_embeddings"):
        document.pop(key)
    scaling = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    document |= {
        "rope_theta": 500.0,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 32},
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(document))
    expected = small(rope_theta=500.0, rope_scaling=SCALED)
    assert differences(open_folder(str(folder)).model, expected) == []


def test_scaling_that_was_added_by_hand_counts_as_it_does_for_transformers(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    assert document["rope_parameters"]["rope_type"] == "default"
    scaling = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    document |= {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(document))
    assert differences(open_folder(str(folder)).model, small(rope_scaling=SCALED)) == []


def test_an_output_matrix_that_is_tied_and_old_frequencies_may_be_in_the_file(tmp_path: Path) -> None:
    reference_llama(small(tie_word_embeddings=True)).save_pretrained(tmp_path / "llama")
    tensors = load_file(tmp_path / "llama" / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "llama" / SINGLE_FILE)
    found = open_folder(str(tmp_path / "llama"))
    assert "model.lm_head.weight" not in found.manifest.tensors
    assert found.has_second_output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"model_type='mistral'.*another architecture.*LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"LlamaForSequenceClassification.*another"),
        ({"model_type": None}, "another architecture"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu', but orchestra's Llama has hidden_act='silu' only"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"rope_type='yarn'.*'llama3'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is None"),
        # Beside the rope_parameters of transformers 5, which count for nothing then.
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type='linear'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": "48"}, r"hidden_size is '48', expected a whole number"),
        ({"hidden_size": 50, "head_dim": None}, "does not divide hidden_size=50"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 does not divide"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"num_hidden_layers": 2_000_000_000}, "30 tensors are too few for num_hidden_layers=2000000000"),
        ({"num_hidden_layers": 2}, r"tensors that this Llama does not have: model\.layers\.2\."),
        ({"vocab_size": 98}, r"embed_tokens\.weight has shape \[97, 48\], by config\.json it is \[98, 48\]"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_what_is_no_llama_of_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **changes}))
    check_refused(folder, message)


def test_pickled_weights_are_refused_and_never_run(folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "was-run"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    (folder / SINGLE_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    check_refused(folder, r"pickles \(pytorch_model\.bin\).*save_pretrained")
    (folder / "pytorch_model.bin").rename(folder / SINGLE_FILE)
    check_refused(folder, "not a safetensors file")
    assert not witness.exists()


def test_one_file_counts_before_the_index_of_an_earlier_save(folder: Path) -> None:
    theirs = reference_llama(small())
    theirs.save_pretrained(folder, max_shard_size="30KB")
    theirs.save_pretrained(folder)
    assert {SINGLE_FILE, INDEX} <= {file.name for file in folder.iterdir()}
    assert set(open_folder(str(folder)).manifest.files) == {SINGLE_FILE}


def test_missing_and_doubled_tensors_and_files_are_named(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:-1]}, folder / SINGLE_FILE)
    check_refused(folder, f"tensors are missing: {names[-1]}|too few")
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    (folder / SINGLE_FILE).rename(folder / "model-00002-of-00002.safetensors")
    check_refused(folder, f"2 \\*.safetensors and no {INDEX}")
    mapping = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))
    check_refused(folder, r"is in model-00001-of-00002.* and in model-00002-of-00002")
    (folder / "model-00002-of-00002.safetensors").unlink()
    check_refused(folder, r"model-00002-of-00002\.safetensors: there is no such file")


@pytest.mark.parametrize("name", ["../secret.safetensors", "pytorch_model.bin", "/etc/passwd"])
def test_an_index_cannot_point_anywhere_else(name: str, folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    check_refused(folder, "expected names of")


def test_a_file_that_is_cut_off_or_has_integers_is_refused(folder: Path) -> None:
    file = folder / SINGLE_FILE
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    check_refused(folder, "cut off")
    file.write_bytes(content + b"x")
    check_refused(folder, "followed by other bytes")
    file.write_bytes(content)
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.int32)}, file)
    check_refused(folder, r"model\.norm\.weight is I32")


@pytest.mark.parametrize("place", ["/", "s3://", "nothing-here"])
def test_a_place_without_a_folder_is_refused(place: str) -> None:
    with pytest.raises(DataError, match=r"expected a folder with config\.json|is not there or empty"):
        open_folder(place)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=_JSON | st.binary(max_size=40), length=st.none() | st.integers(0, 1 << 63), tail=st.integers(0, 9)
)
def test_no_header_makes_anything_but_words(
    header: object, length: int | None, tail: int, tmp_path: Path
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text) if length is None else length) + text + bytes(tail)
    (tmp_path / "x.safetensors").write_bytes(content)
    try:
        found = read_header(LocalStorage(tmp_path), "", "x.safetensors")
    except DataError:
        return
    assert sum(tensor.num_bytes for tensor in found.tensors.values()) == tail


def test_overrides_make_the_model_that_the_folder_fits(tmp_path: Path) -> None:
    model = small(
        rope_theta=500.0, rope_scaling=SCALED, head_dim=16, vocab_size=257, max_position_embeddings=99
    )
    reference_llama(model).save_pretrained(tmp_path / "a b,c" / "my-llama")
    found = open_folder(str(tmp_path / "a b,c" / "my-llama"))
    config = compose(overrides_for(found)).config
    assert differences(config.model, model) == []
    assert config.model.init_from == found.place
    assert (config.model.name, config.model.max_position_embeddings) == ("my-llama", 99)


def test_weights_that_are_gone_or_another_models_are_refused_with_what_helps(
    folder: Path, tmp_path: Path
) -> None:
    config = Config(model=small(init_from=str(folder), hidden_size=96, rope_theta=5e5, init_std=0.5))
    (problem,) = init_from_problems(config)
    assert "model.hidden_size=48 (configured 96)" in problem
    assert "add model.hidden_size=48 model.rope_theta=10000.0," in problem
    fitting = Config(model=small(init_from=str(folder), max_position_embeddings=8192, head_dim=8))
    assert list(init_from_problems(fitting)) == []
    assert list(init_from_problems(Config())) == []
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "checkpoints" / "step-00000010" / "manifest.json").touch()
    (run / "config.yaml").touch()
    for place in (run, run / "checkpoints" / "step-00000010"):
        (problem,) = init_from_problems(Config(model=ModelConfig(init_from=str(place))))
        assert f"`orchestra checkpoint export {run} --to FOLDER`" in problem
    (problem,) = init_from_problems(Config(model=ModelConfig(init_from="/nowhere/llama")))
    assert problem.startswith("model.init_from: /nowhere/llama is not there or empty")
