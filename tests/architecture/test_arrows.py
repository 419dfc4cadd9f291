"""The arrows of the house: who may import whom. What is not allowed here is forbidden."""

from __future__ import annotations

import graphlib
import sys

import pytest
from source_tree import PACKAGES, Module, ancestors, imports, modules, reached, trail

# Inside orchestra each part imports only parts that stand before it.
ORDER = (
    # what both planes know: errors, a run on disk, arithmetic
    *("errors", "sizes", "run"),
    # shapes and bytes of published weights
    "huggingface",
    # one device
    *("precision", "model", "data", "optim"),
    "parallel",
    # the data plane
    "train",
    # the control plane
    *("recovery", "plan", "report"),
    *("config", "submit", "doctor", "agents", "rehearsal", "cli", "__main__"),
)
CONTROL_PLANE = {
    *("recovery", "plan", "report", "config", "submit", "doctor", "agents", "rehearsal", "cli", "__main__")
}
WITHOUT_TORCH = CONTROL_PLANE | set(ORDER[: ORDER.index("precision")])

# Packages outside the standard library that each of ours may import; orchestra may import any of pyproject's.
THIRD_PARTY = {
    "conf": set(),
    "launchers": {"submitit"},
    "checkpointing": {"torch", "safetensors", "fsspec", "numpy", "xxhash"},
}
OF_OURS = {
    "conf": {"conf"},
    "launchers": {"launchers"},
    "checkpointing": {"checkpointing"},
    "orchestra": {"orchestra", "conf", "launchers", "checkpointing"},
}


def part(name: str) -> str:
    """Return the part of orchestra that a dotted name belongs to; the empty string for the package itself."""
    return name.split(".")[1] if "." in name else ""


def is_entry_point(module: Module) -> bool:
    """Whether nobody imports it: the Hydra plugin is loaded by Hydra and may import it."""
    return module.name.startswith("launchers.plugin")


LIBRARY = [module for module in modules().values() if not is_entry_point(module)]
OF_ORCHESTRA = [module for module in LIBRARY if module.name.split(".")[0] == "orchestra"]


def test_every_part_of_orchestra_has_a_place_in_the_order() -> None:
    assert {part(module.name) for module in OF_ORCHESTRA} - {""} <= set(ORDER)


@pytest.mark.parametrize("module", OF_ORCHESTRA, ids=lambda module: module.name)
def test_imports_inside_orchestra_point_to_what_stands_before(module: Module) -> None:
    here = part(module.name)
    for target in imports(module, with_lazy=True):
        if target.split(".")[0] != "orchestra" or part(target) in ("", here):
            continue
        assert here in ORDER, (
            f"the package itself imports nothing of its own, but {module.name} imports {target}"
        )
        assert ORDER.index(part(target)) < ORDER.index(here), f"{module.name} imports {target}"


@pytest.mark.parametrize("module", LIBRARY, ids=lambda module: module.name)
def test_packages_import_only_what_the_house_allows(module: Module) -> None:
    package = module.name.split(".")[0]
    for target in imports(module, with_lazy=True):
        top = target.split(".")[0]
        if top in PACKAGES:
            assert top in OF_OURS[package], f"{module.name} imports {target}"
        elif package in THIRD_PARTY and top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[package], f"{module.name} imports {target}"


@pytest.mark.parametrize("module", OF_ORCHESTRA, ids=lambda module: module.name)
def test_only_the_control_plane_imports_launchers(module: Module) -> None:
    if part(module.name) not in CONTROL_PLANE:
        assert "launchers" not in {target.split(".")[0] for target in imports(module, with_lazy=True)}


@pytest.mark.parametrize(
    "module",
    [module for module in LIBRARY if part(module.name) in WITHOUT_TORCH],
    ids=lambda module: module.name,
)
def test_control_plane_never_reaches_torch_or_the_data_plane(module: Module) -> None:
    importer = reached(module.name)
    for target in importer:
        parts = target.split(".")
        is_data_plane = parts[0] == "orchestra" and part(target) in ("train", "parallel")
        assert parts[0] != "torch", f"{trail(importer, target)}"
        assert not is_data_plane, f"{trail(importer, target)}"


def test_no_import_cycles_when_modules_load() -> None:
    graph = {}
    for module in modules().values():
        targets = imports(module, with_lazy=False)
        for target in list(targets):
            targets.update(ancestors(target))
        around = {module.name, *ancestors(module.name)}
        graph[module.name] = {target for target in targets if target in modules()} - around
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " → ".join(error.args[1]))


def test_nobody_imports_tests_or_benchmarks() -> None:
    for module in modules().values():
        tops = {target.split(".")[0] for target in imports(module, with_lazy=True)}
        assert not tops & {"tests", "benchmarks"}, module.name
