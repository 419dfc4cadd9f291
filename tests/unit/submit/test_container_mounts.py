"""Which folders a container is given beside the mounts that the configuration has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.command_line import CommandLine

from conf.schema import BlendPart, Config, ContainerConfig, EvalConfig
from orchestra.submit.container_mounts import image_mounts, mount_problems, prefix_variable

RUNS = Path("/shared/ada/runs")


def folder_of(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file in files:
        (path / file).write_text("")
    return path


def asked(container: ContainerConfig, **keys: object) -> Config:
    config = Config()
    for name, value in keys.items():
        section, _, key = name.partition("_")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{key: value})}
        )
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, container=container))


def test_what_no_mount_shows_is_mounted_and_data_for_reading_only(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", "prose.bin", "prose.json")
    code = folder_of(tmp_path / "code", "code.bin", "code.json")
    weights = folder_of(tmp_path / "weights", "config.json")
    blend = [BlendPart(str(data / "prose")), BlendPart(str(code / "code"))]
    config = asked(
        ContainerConfig(image="x", mounts=[f"{code}:{code}", "/opt:/opt:ro"]),
        data_blend=blend,
        model_init_from=str(weights),
        checkpoint_dir=str(tmp_path / "not" / "yet"),
    )
    first, *mounts = image_mounts(config, RUNS)
    assert first == f"{RUNS}:{RUNS}"
    # The folder that the checkpoints' is made in holds the others; data in it is read through it.
    assert mounts == [f"{code}:{code}", "/opt:/opt:ro", f"{tmp_path}:{tmp_path}"]
    of_data = dataclasses.replace(config, checkpoint=Config().checkpoint)
    assert image_mounts(of_data, RUNS)[3:] == [f"{data}:{data}:ro", f"{weights}:{weights}:ro"]
    assert list(mount_problems(of_data, RUNS)) == []
    held_out = folder_of(tmp_path / "held", "wiki.bin", "wiki.json")
    evaluated = EvalConfig(every_steps=5, data={"wiki": {"path": str(held_out / "wiki")}})
    of_data = dataclasses.replace(of_data, eval=evaluated)
    assert f"{held_out}:{held_out}:ro" in image_mounts(of_data, RUNS)


def test_a_place_to_write_is_not_what_is_mounted_for_reading(tmp_path: Path) -> None:
    container = ContainerConfig(image="x", mounts=[f"{tmp_path}:{tmp_path}:ro"])
    config = asked(container, checkpoint_dir=str(tmp_path))
    assert image_mounts(config, RUNS)[2:] == [f"{tmp_path}:{tmp_path}"]


def test_where_links_among_the_files_lead_is_mounted_too(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    blobs = folder_of(tmp_path / "blobs", "abc")
    snapshot = folder_of(tmp_path / "snapshots", "config.json")
    (snapshot / "model.safetensors").symlink_to(blobs / "abc")
    config = asked(ContainerConfig(image="x"), model_init_from=str(snapshot))
    assert set(image_mounts(config, RUNS)[1:]) == {f"{blobs}:{blobs}:ro", f"{snapshot}:{snapshot}:ro"}


@pytest.mark.parametrize(
    ("program", "variable"), [("apptainer", "APPTAINER_BIND"), ("singularity", "SINGULARITY_BIND")]
)
def test_apptainer_is_told_by_its_variable(tmp_path: Path, program: str, variable: str) -> None:
    data = folder_of(tmp_path / "data", "prose.bin", "prose.json")
    path = str(data / "prose.bin")
    config = asked(ContainerConfig(prefix=f"/usr/bin/{program} exec --nv image.sif"), data_path=path)
    assert prefix_variable(config, RUNS) == (variable, f"{RUNS}:{RUNS},{data}:{data}:ro")
    bound = asked(
        ContainerConfig(prefix=f"{program} exec --bind /shared,{tmp_path} image.sif"), data_path=path
    )
    assert prefix_variable(bound, RUNS) is None
    assert prefix_variable(asked(ContainerConfig(prefix="numactl -m 0"), data_path=path), RUNS) is None


def test_what_docker_is_not_told_to_mount_is_refused(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", "prose.bin", "prose.json")

    def problems(options: str) -> list[str]:
        container = ContainerConfig(prefix=f"docker run {options} image")
        return list(mount_problems(asked(container, data_path=str(data / "prose")), RUNS))

    runs, of_data = problems("--rm")
    assert f"run.dir: {RUNS} is not mounted by cluster.container.prefix (docker)" in runs
    assert f"mount {data}:{data}:ro" in of_data
    assert problems(f"-v /shared:/shared -v {data}:{data}:ro") == []
    (only_read,) = problems(f"-v /shared:/shared:ro --mount type=bind,source={data},target={data},readonly")
    assert "to write there" in only_read


def test_folders_that_no_container_can_be_given_are_refused(tmp_path: Path) -> None:
    odd = folder_of(tmp_path / "a:b", "prose.bin", "prose.json")
    (problem,) = mount_problems(asked(ContainerConfig(image="x"), data_path=str(odd / "prose")), RUNS)
    assert "a colon or a comma" in problem
    (problem,) = mount_problems(asked(ContainerConfig(image="x"), checkpoint_dir="/nowhere/at/all"), RUNS)
    assert "checkpoint.dir lies in no folder that exists" in problem
    (problem,) = mount_problems(asked(ContainerConfig(prefix="docker 'run")), RUNS)
    assert "close what is quoted" in problem


def test_submit_mounts_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    weights = tmp_path / "checkpoints"
    weights.mkdir()
    small = ("submit", "cluster.device=cpu", "cluster.gpus_per_node=2", "run.name=mine", "--dry-run")
    elsewhere = f"checkpoint.dir={weights}"
    image = orchestra(*small, "run.dir=runs", elsewhere, "cluster.container.image=x").out
    assert f"--container-mounts={tmp_path}/runs:{tmp_path}/runs,{weights}:{weights}" in image
    (tmp_path / "second").mkdir()
    fallback = f"checkpoint.fallback_dir={tmp_path}/second"
    image = orchestra(*small, "run.dir=runs", fallback, "cluster.container.image=x").out
    assert f"--container-mounts={tmp_path}/runs:{tmp_path}/runs,{tmp_path}/second:{tmp_path}/second" in image
    monkeypatch.setenv("HOME", str(tmp_path))
    of_home = ("cluster.container.image=~/x.sqsh", "cluster.container.mounts=['~/data:~/data:ro', '~:/home']")
    image = orchestra(*small, elsewhere, *of_home).out
    assert f"--container-image={tmp_path}/x.sqsh" in image
    assert f",{tmp_path}/data:{tmp_path}/data:ro,{tmp_path}:/home" in image
    for name in ("nvcr.io/nvidia/pytorch:25.01", "docker://nvidia/pytorch"):
        assert f"--container-image={name}" in orchestra(*small, f"cluster.container.image={name}").out
    assert f"={tmp_path}/x.sqsh" in orchestra(*small, "cluster.container.image=./x.sqsh").out
    prefix = "cluster.container.prefix='apptainer exec x.sif'"
    bound = orchestra(*small, elsewhere, prefix).out
    runs = f"{tmp_path}/runs:{tmp_path}/runs"
    assert (
        f"\nexport APPTAINER_BIND={runs},{weights}:{weights}${{APPTAINER_BIND:+,$APPTAINER_BIND}}\n" in bound
    )
    refused = orchestra(*small, elsewhere, "cluster.container.prefix='podman run x'", code=2).err
    assert "run.dir" in refused
    assert "checkpoint.dir" in refused
