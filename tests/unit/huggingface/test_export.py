"""What is exported: the same model in transformers' hands, whole or not there, every byte verified."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llamas import MODELS, SCALED, save, small, transformer
from safetensors import safe_open

from checkpointing.box import Box
from checkpointing.checkpoint_errors import DamagedError
from checkpointing.manifest import Manifest
from checkpointing.storage.local import LocalStorage
from conf.schema import Family, ModelConfig
from orchestra.errors import ConfigError, DataError
from orchestra.huggingface.export import ExportPlan, ExportRequest, plan_export, runs, write_export
from orchestra.huggingface.folder import INDEX, open_folder, parameter_shapes

TOKENS = torch.arange(2 * 40).reshape(2, 40) * 7 % 97


def exported(place: Path, manifest: Manifest, model: ModelConfig, **wanted: Any) -> ExportPlan:
    plan = plan_export(manifest, model, ExportRequest(target=place / "out", **wanted))
    write_export(LocalStorage(place), manifest, plan)
    return plan


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_it_and_computes_the_same_logits(model: ModelConfig, tmp_path: Path) -> None:
    ours = transformer(model)
    exported(tmp_path, save(tmp_path, ours), model)
    theirs, info = loaded(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert theirs.dtype == torch.float32
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        assert torch.equal(state[name if name.startswith("lm_head") else f"model.{name}"], parameter), name
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("model", MODELS)
def test_our_shapes_are_those_of_our_model(model: ModelConfig) -> None:
    shapes = {name: tuple(it.shape) for name, it in transformer(model).named_parameters()}
    assert parameter_shapes(model) == shapes
    assert list(parameter_shapes(model)) == list(shapes)


def test_files_are_at_most_as_large_as_asked_for_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    model = small()
    ours = transformer(model)
    plan = exported(tmp_path, save(tmp_path, ours), model, max_file_bytes=40_000)
    files = [file.name for file in plan.files]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == plan.names
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * plan.num_parameters
    sizes = []
    for name in files:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {tensor for tensor, its in index["weight_map"].items() if its == name} == set(file.keys())
            sizes.append(sum(4 * file.get_tensor(key).numel() for key in file.keys()))  # noqa: SIM118
    assert max(sizes) <= 40_000
    assert sum(sizes) == 4 * plan.num_parameters
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tmp_path / "out")(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize(("dtype", "expected"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_16_bit_weights_are_rounded_as_torch_rounds(
    dtype: str, expected: torch.dtype, tmp_path: Path
) -> None:
    model = small()
    ours = transformer(model)
    exported(tmp_path, save(tmp_path, ours), model, dtype=dtype)
    theirs = loaded(tmp_path / "out", dtype="auto")
    assert theirs.dtype == expected
    weight = theirs.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight, ours.layers[1].mlp.up_proj.weight.to(expected))  # type: ignore[union-attr]


def test_a_number_beyond_fp16_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    model = small()
    ours = transformer(model)
    with torch.no_grad():
        ours.norm.weight[3] = 7e4
    manifest = save(tmp_path, ours)
    with pytest.raises(DataError, match=r"model\.norm\.weight: 1 of its numbers .*--dtype bf16"):
        exported(tmp_path, manifest, model, dtype="F16")
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010"}


def test_text_ends_at_the_separator_and_not_at_a_token_of_llama(tmp_path: Path) -> None:
    model = small()
    exported(tmp_path, save(tmp_path, transformer(model)), model, end_of_text=96)
    theirs = loaded(tmp_path / "out")
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, 96)
    assert theirs.generation_config.eos_token_id == 96


@pytest.mark.parametrize("offset", [0, 1, 100])
def test_a_flipped_bit_is_found_named_and_nothing_is_left(offset: int, tmp_path: Path) -> None:
    model = small()
    manifest = save(tmp_path, transformer(model))
    chunk = manifest.tensors["model.layers.1.mlp.up_proj.weight"].chunks[1]
    file = tmp_path / "step-00000010" / chunk.file
    content = bytearray(file.read_bytes())
    content[chunk.begin + offset] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"00000-00\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        exported(tmp_path, manifest, model)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010"}


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    model = small()
    manifest = save(tmp_path, transformer(model))
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        exported(tmp_path, manifest, model)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    (target / "mine.txt").unlink()
    exported(tmp_path, manifest, model)
    assert open_folder(str(target)).model.hidden_size == 48


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    manifest = save(tmp_path, transformer(model))
    figures = os.statvfs(tmp_path)
    full = os.statvfs_result((*figures[:4], 1, *figures[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(ConfigError, match="0 MiB are free"):
        exported(tmp_path, manifest, model)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010"}


def test_the_gpt_family_and_another_shape_are_refused(tmp_path: Path) -> None:
    model = small()
    manifest = save(tmp_path, transformer(model))
    with pytest.raises(DataError, match=r"model\.family=gpt has no Hugging Face form"):
        plan_export(manifest, small(family=Family.gpt), ExportRequest(tmp_path / "out"))
    with pytest.raises(DataError, match=r"embed_tokens\.weight has shape \[97, 48\].*\[98, 48\]"):
        plan_export(manifest, small(vocab_size=98), ExportRequest(tmp_path / "out"))
    with pytest.raises(DataError, match=r"no tensor model\.layers\.3\."):
        plan_export(manifest, small(num_hidden_layers=4), ExportRequest(tmp_path / "out"))


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


def test_scaled_positions_are_written_under_the_names_all_versions_read(tmp_path: Path) -> None:
    model = small(rope_scaling=SCALED)
    exported(tmp_path, save(tmp_path, transformer(model)), model)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["rope_scaling"]["rope_type"] == "llama3"
    assert document["rope_theta"] == 10000.0
