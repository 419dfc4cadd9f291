"""The run directory: all at once or not at all, and never over somebody's run."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device, NetworkConfig, RunConfig
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.submit import new_run
from orchestra.submit.launch import launch_spec, source_root, worker_environment
from orchestra.submit.new_run import RunRequest, code_revision, planned_run, prepare


def _request(parent: Path, name: str | None = "mine") -> RunRequest:
    cluster = ClusterConfig(gpus_per_node=2, device=Device.cpu)
    config = dataclasses.replace(Config(), run=RunConfig(name=name, dir=str(parent)), cluster=cluster)
    return RunRequest(config, "0123456789abcdef", ["train.steps=3"], ["orchestra", "run"])


def test_an_existing_name_is_refused_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("mine", "link"):
        with pytest.raises(ConfigError, match=f"run.name={name}.*exists already; choose another"):
            planned_run(_request(tmp_path, name), now=0.0)


@pytest.mark.parametrize(
    ("model", "begin"),
    [("org/llama 3", "org-llama-3-"), ("../esc", "esc-"), ("-x", "x-"), ("…", "run-"), ("a" * 300, "a" * 60)],
)
def test_a_run_is_called_by_its_model_as_far_as_that_names_a_folder(
    tmp_path: Path, model: str, begin: str
) -> None:
    request = _request(tmp_path, None)
    named = dataclasses.replace(request.config.model, name=model)
    config = dataclasses.replace(request.config, model=named)
    run = planned_run(dataclasses.replace(request, config=config), 0.0)
    assert run.path.parent == tmp_path
    assert run.name.startswith(begin)
    assert len(run.name) < 100


def test_two_that_want_the_same_name_at_once_do_not_share_it(tmp_path: Path) -> None:
    request = _request(tmp_path)
    first, second = planned_run(request, 0.0), planned_run(request, 0.0)
    prepare(request, first)
    (first.path / "metrics.jsonl").write_text("kept")
    with pytest.raises(ConfigError, match="exists already"):
        prepare(request, second)
    assert (first.path / "metrics.jsonl").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_environment_shares_the_cores_keeps_the_packages_importable_and_names_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _request(Path()).config
    root = str(source_root())
    environment = worker_environment(config, 2, cores=9, search_path=["/elsewhere", root])
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["PYTHONPATH"].split(":") == [root, "/elsewhere"]
    assert worker_environment(config, 16, cores=2)["OMP_NUM_THREADS"] == "1"
    # Compilers share the cores out too, whatever threads a rank computes with, unless somebody chose.
    compilers = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(compilers, raising=False)
    shares = [worker_environment(config, 8, cores=cores)[compilers] for cores in (4, 96, 1024)]
    assert shares == ["1", "12", "32"]
    monkeypatch.setenv(compilers, "5")
    assert compilers not in worker_environment(config, 8, cores=96)
    fixed = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, threads_per_rank=3))
    assert worker_environment(fixed, 2, cores=64)["OMP_NUM_THREADS"] == "3"
    cluster = dataclasses.replace(config.cluster, network=NetworkConfig(interface="eth7"))
    environment = worker_environment(dataclasses.replace(config, cluster=cluster), 2, cores=2)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("eth7", "eth7")


def test_the_launch_follows_from_the_configuration_alone(tmp_path: Path) -> None:
    config, run = _request(tmp_path).config, RunDir(tmp_path / "mine")
    spec = launch_spec(config, run, attempt=2)
    assert spec == launch_spec(config, run, attempt=2)
    assert spec.arguments == (str(run.path), "--attempt", "2")
    assert (spec.world_size, spec.node_logs) == (2, (run.node_log(2, 0),))
    assert list(tmp_path.iterdir()) == []


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_the_revision_knows_a_clean_tree_from_a_changed_one_and_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_run, "source_root", lambda: tmp_path)
    package = tmp_path / "orchestra"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert code_revision() is None
    _git(tmp_path, "init")
    assert code_revision() is None, "inside a repository, but not of it"
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    revision = code_revision()
    assert revision is not None
    assert (len(revision["commit"]), revision["dirty"]) == (40, False)
    (package / "__init__.py").write_text("changed")
    changed = code_revision()
    assert changed is not None
    assert changed["dirty"]


def test_unnamed_runs_of_the_same_second_get_names_and_wandb_ids_of_their_own(tmp_path: Path) -> None:
    request = _request(tmp_path, name=None)
    runs = [prepare(request, planned_run(request, now=1e9)) for _ in range(3)]
    first = runs[0].name
    model, date, clock, signature = first.split("-")
    assert (model, signature, len(date), len(clock)) == ("debug", "012345", 8, 6)
    assert [run.name for run in runs] == [first, f"{first}-2", f"{first}-3"]
    records = [json.loads(run.record.read_text()) for run in runs]
    assert [record["name"] for record in records] == [run.name for run in runs]
    assert len({record["wandb_id"] for record in records}) == 3
    assert read_config(runs[1].config).run.name == f"{first}-2"


def test_a_full_disk_is_a_configuration_error_and_leaves_nothing(tmp_path: Path) -> None:
    request = _request(tmp_path / "deep" / "runs")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files end after 100 bytes, as they do where the disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"run\.dir=.*cannot make a run directory.*choose another"):
            prepare(request, planned_run(request, 0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("parent", "name", "words"),
    [
        ("file", "mine", r"run\.dir=.*choose another run\.dir"),
        ("runs", "n" * 300, "too long"),
        ("~nobody-here/runs", "mine", r"run\.dir=~nobody-here"),
    ],
    ids=["a file in the way", "a name that is too long", "a home that does not exist"],
)
def test_what_cannot_be_made_is_a_configuration_error_and_not_called_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    request = _request(Path(parent), name)
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(request, planned_run(request, 0.0))
    assert "exists already" not in str(caught.value)
