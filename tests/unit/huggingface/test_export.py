"""What is exported: the same model in transformers' hands, whole or not there, every byte verified."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from llamas import flip, save, transformer
from safetensors import safe_open

from checkpointing.box import Box
from checkpointing.checkpoint_errors import DamagedError
from checkpointing.manifest import Manifest
from checkpointing.storage.local import LocalStorage
from conf.schema import ModelConfig
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.export import (
    ExportPlan,
    ExportRequest,
    converted,
    plan_export,
    runs,
    stored,
    write_export,
)
from orchestra.huggingface.folder import INDEX, differences, open_folder
from orchestra.huggingface.hub_names import parameter_shapes
from tests.support.reference_llama import MODELS, SCALED, small

TOKENS = torch.arange(2 * 40).reshape(2, 40) * 7 % 97


def exported(place: Path, manifest: Manifest, model: ModelConfig, **wanted: Any) -> ExportPlan:
    plan = plan_export(manifest, model, ExportRequest(target=place / "out", **wanted))
    write_export(LocalStorage(place), manifest, plan)
    return plan


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """The checkpoint of a small model."""
    return save(tmp_path, transformer(small()))


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("model", MODELS)
def test_transformers_and_we_read_the_same_model_from_it(model: ModelConfig, tmp_path: Path) -> None:
    ours = transformer(model)
    parameters = dict(ours.named_parameters())
    manifest = save(tmp_path, ours)
    exported(tmp_path, manifest, model, max_file_bytes=50_000)
    theirs, info = loaded(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert theirs.dtype == torch.float32
    state = theirs.state_dict()
    for name, parameter in parameters.items():
        assert torch.equal(state[name if name.startswith("lm_head") else f"model.{name}"], parameter), name
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=2e-5)

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert list(parameter_shapes(model).items()) == list(shapes.items())
    folder = open_folder(str(tmp_path / "out"))
    assert differences(model, folder.model) == []
    found = {name: tensor.shape for name, tensor in folder.manifest.tensors.items()}
    assert found == {f"model.{name}": shape for name, shape in shapes.items()}


def test_files_are_at_most_as_large_as_asked_for_and_the_index_names_every_tensor(
    manifest: Manifest, tmp_path: Path
) -> None:
    plan = exported(tmp_path, manifest, small(), max_file_bytes=40_000)
    files = [file.name for file in plan.files]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert files_in(tmp_path / "out") == set(plan.names)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * plan.num_parameters
    sizes = []
    for name in files:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            listed = {tensor for tensor, place in index["weight_map"].items() if place == name}
            assert listed == set(file.keys())
            sizes.append(sum(4 * file.get_tensor(key).numel() for key in file.keys()))  # noqa: SIM118
    assert max(sizes) <= 40_000
    assert sum(sizes) == 4 * plan.num_parameters


@pytest.mark.parametrize(("dtype", "expected"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_16_bit_weights_are_rounded_as_torch_rounds(
    dtype: str, expected: torch.dtype, manifest: Manifest, tmp_path: Path
) -> None:
    exported(tmp_path, manifest, small(), dtype=dtype)
    theirs = loaded(tmp_path / "out", dtype="auto")
    assert theirs.dtype == expected
    name = "layers.1.mlp.up_proj.weight"
    weight = transformer(small()).get_parameter(name)
    assert torch.equal(theirs.model.get_parameter(name), weight.to(expected))


def test_an_export_that_fails_names_the_cause_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = transformer(small())
    with torch.no_grad():
        ours.norm.weight[3] = 7e4
    manifest = save(tmp_path, ours)
    with pytest.raises(DataError, match=r"model\.norm\.weight: 1 of its numbers .*--dtype bf16"):
        exported(tmp_path, manifest, small(), dtype="F16")
    flip(tmp_path, 10, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(DamagedError, match=r"00000-00\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        exported(tmp_path, manifest, small())
    figures = os.statvfs(tmp_path)
    full = os.statvfs_result((*figures[:4], 1, *figures[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(ConfigError, match="0 MiB are free"):
        exported(tmp_path, manifest, small())
    assert files_in(tmp_path) == {"step-00000010"}


def test_text_ends_at_the_separator_and_names_are_those_that_all_versions_read(tmp_path: Path) -> None:
    model = small(rope_scaling=SCALED)
    exported(tmp_path, save(tmp_path, transformer(model)), model, end_of_text=96)
    theirs = loaded(tmp_path / "out")
    # Not at one of Llama's own tokens.
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, 96)
    assert theirs.generation_config.eos_token_id == 96
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (document["rope_scaling"]["rope_type"], document["rope_theta"]) == ("llama3", 10000.0)


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_is_filled(
    manifest: Manifest, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        exported(tmp_path, manifest, small())
    assert files_in(target) == {"mine.txt"}
    (target / "mine.txt").unlink()
    exported(tmp_path, manifest, small())
    assert open_folder(str(target)).model.hidden_size == 48


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (small(vocab_size=98), r"embed_tokens\.weight has shape \[97, 48\].*\[98, 48\]"),
        (small(num_hidden_layers=4), r"no tensor model\.layers\.3\."),
    ],
)
def test_another_model_is_refused(model: ModelConfig, words: str, manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        plan_export(manifest, model, ExportRequest(tmp_path / "out"))


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((), ()), ()),
        (Box((2,), (3,)), (7,)),
        (Box((0, 0), (5, 4)), (5, 4)),
        (Box((1, 0), (3, 4)), (5, 4)),
        (Box((1, 2), (3, 2)), (5, 4)),
        (Box((1, 1, 0), (2, 2, 4)), (3, 5, 4)),
        (Box((1, 1, 3), (2, 2, 1)), (3, 5, 4)),
    ],
)
def test_runs_of_a_box_are_its_elements_in_the_whole_tensor(box: Box, shape: tuple[int, ...]) -> None:
    whole = torch.arange(Box.whole(shape).num_elements).reshape(shape)
    part = whole[box.within(Box.whole(shape))]
    found = torch.full(shape, -1).reshape(-1)
    for index, first in runs(box, shape):
        run = part[index].reshape(-1)
        found[first : first + len(run)] = run
    expected = torch.full(shape, -1)
    expected[box.within(Box.whole(shape))] = part
    assert torch.equal(found, expected.reshape(-1))


# Rounding against torch's own, over all kinds of bit patterns.

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Zeros, infinities, NaNs that signal or would carry over, the largest numbers, ties both ways, denormals.
SPECIAL = (
    *(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x00018000, 1),
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33800000, 0x38801000),
)


def singles() -> npt.NDArray[np.uint32]:
    random = np.random.default_rng(5).integers(0, 1 << 32, size=300_000, dtype=np.uint32)
    return np.concatenate([np.array(SPECIAL, dtype=np.uint32), random])


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("source", ["F32", "BF16", "F16"])
def test_every_pattern_is_rounded_as_torch_rounds_it(source: str, target: str) -> None:
    bits = singles().astype(np.uint32 if source == "F32" else np.uint16)
    expected = torch.frombuffer(bytearray(bits.tobytes()), dtype=TORCH[source]).to(TORCH[target])
    ours, _ = converted(stored(bits.tobytes(), source), source, target)
    found = torch.frombuffer(bytearray(ours.tobytes()), dtype=TORCH[target])
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    integer = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(found.view(integer)[~is_nan], expected.view(integer)[~is_nan])


def test_only_finite_numbers_that_became_infinite_are_counted() -> None:
    numbers = np.array([1.0, 65504.0, 65519.9, 65520.0, -1e30, np.inf, np.nan, 3.4e38], dtype="<f4")
    assert converted(numbers, "F32", "F16")[1] == 3
    assert converted(numbers, "F32", "BF16")[1] == 1
    assert converted(numbers, "F32", "F32")[1] == 0
