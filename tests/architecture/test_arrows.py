"""The arrows of the house: who may import whom. What is not allowed here is forbidden."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib

import pytest
from source_tree import PACKAGES, ROOT, ancestors, imports, modules, modules_in, reached, trail

# Inside orchestra each part imports only parts that stand before it.
ORDER = (
    # what both planes know: errors, a run on disk, arithmetic
    *("errors", "plugins", "sizes", "run"),
    # shapes and bytes of published weights
    "huggingface",
    # one device
    *("model", "precision", "data", "optim"),
    "parallel",
    # the data plane
    "train",
    # the control plane
    *("recovery", "plan", "report", "alerts"),
    *("config", "submit", "doctor", "agents", "rehearsal", "cli", "__main__"),
)
CONTROL_PLANE = set(ORDER[ORDER.index("recovery") :])
WITHOUT_TORCH = CONTROL_PLANE | set(ORDER[: ORDER.index("model")])

# Packages outside the standard library that each of ours may import; orchestra may import any of pyproject's.
THIRD_PARTY = {
    "conf": set(),
    "launchers": set(),
    "checkpointing": {"torch", "fsspec", "numpy", "xxhash"},
}
# Modules that have another name than the package in pyproject.toml which brings them.
BROUGHT_BY = {"hydra": "hydra-core", "yaml": "omegaconf", "pynvml": "nvidia-ml-py"}
# A program of its own, which becomes torchrun: nobody imports it.
IS_TORCHRUN = "launchers.bound_torchrun"
OF_OURS = {
    "conf": {"conf"},
    "launchers": {"launchers"},
    "checkpointing": {"checkpointing"},
    "orchestra": {"orchestra", "conf", "launchers", "checkpointing"},
}


def part(name: str) -> str:
    """Return the part of orchestra that a dotted name belongs to; the empty string for the package itself."""
    return name.split(".")[1] if "." in name else ""


# The plugin is loaded by Hydra and may import it.
LIBRARY = [module for module in modules().values() if not module.name.startswith("launchers.plugin")]
OF_ORCHESTRA = [module for module in LIBRARY if module.name.split(".")[0] == "orchestra"]


def test_every_part_of_orchestra_has_a_place_in_the_order() -> None:
    assert {part(module.name) for module in OF_ORCHESTRA} - {""} <= set(ORDER)


def test_imports_inside_orchestra_point_to_what_stands_before() -> None:
    wrong = []
    for module in OF_ORCHESTRA:
        here = part(module.name)
        # The package itself imports nothing of its own.
        place = ORDER.index(here) if here else 0
        wrong += [
            f"{module.name} imports {target}"
            for target in imports(module)
            if target.split(".")[0] == "orchestra" and part(target) not in ("", here)
            if ORDER.index(part(target)) >= place
        ]
    assert wrong == []


def test_packages_import_only_what_the_house_allows() -> None:
    wrong = []
    for module in LIBRARY:
        package = module.name.split(".")[0]
        assert IS_TORCHRUN not in imports(module)
        for target in imports(module):
            top = target.split(".")[0]
            is_foreign = package in THIRD_PARTY and top not in sys.stdlib_module_names
            if top in PACKAGES:
                is_allowed = top in OF_OURS[package]
            else:
                is_allowed = not is_foreign or top in THIRD_PARTY[package]
            if not is_allowed and (module.name, top) != (IS_TORCHRUN, "torch"):
                wrong.append(f"{module.name} imports {target}")
    assert wrong == []


def test_what_is_imported_is_what_pyproject_declares() -> None:
    """An environment without the tests' own packages is enough: those of extras are tried for only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = packages_in(project["dependencies"])
    extras = packages_in([each for extra in project["optional-dependencies"].values() for each in extra])
    wrong, found = [], set()
    for module in (*modules().values(), *modules_in("slurm")):
        for top in {target.split(".")[0] for target in imports(module)} - {*PACKAGES, "slurm"}:
            if top not in sys.stdlib_module_names:
                package = BROUGHT_BY.get(top, top)
                found.add(package)
                if package not in declared and not (package in extras and top in tried(module.tree)):
                    wrong.append(f"{module.name} imports {top}")
    assert wrong == []
    # What is declared is found; files of safetensors are read and written without that package.
    assert declared <= found
    source = "import a\ntry:\n    import b.c\nexcept ImportError:\n    import d\n"
    assert tried(ast.parse(source)) == {"b"}


def packages_in(requirements: list[str]) -> set[str]:
    """Return the names in requirements such as `moto[server]>=5.0`."""
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def tried(tree: ast.Module) -> set[str]:
    """Return the packages that are imported where a handler of ImportError stands around it."""
    return {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each) for each in node.handlers)
        for inner in node.body
        if isinstance(inner, ast.Import)
        for alias in inner.names
    }


def test_the_library_uses_no_private_names_of_torch() -> None:
    """Users keep its checkpoints longer than a version of torch."""
    found = [
        f"{module.name}: {name}"
        for module in LIBRARY
        if module.name.split(".")[0] == "checkpointing"
        for name in private_names(module.tree)
    ]
    assert found == []
    assert private_names(ast.parse("from torch._C import Size\nimport torch.a._b")) == [
        "torch._C.Size",
        "torch.a._b",
    ]
    assert private_names(ast.parse("import torch.distributed as dist\ndist.x._y()")) == ["dist.x._y"]
    assert private_names(ast.parse("from torch.distributed import _functional")) == [
        "torch.distributed._functional"
    ]


def private_names(tree: ast.Module) -> list[str]:
    """Return the private names of torch that a module imports, or reads from what it imported."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {each.asname or each.name.split(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    of_torch = {name for name, target in imported.items() if target.split(".")[0] == "torch"}
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = [name for name in used if name.split(".")[0] in of_torch]
    names = [*(target for target in imported.values() if target.split(".")[0] == "torch"), *read]
    return [name for name in names if re.search(r"\._(?!_)", name)]


def test_only_the_control_plane_imports_launchers() -> None:
    importers = {
        part(module.name)
        for module in OF_ORCHESTRA
        if "launchers" in {target.split(".")[0] for target in imports(module)}
    }
    assert importers - CONTROL_PLANE == set()


def test_control_plane_never_reaches_torch_or_the_data_plane() -> None:
    importer = reached(*(module.name for module in LIBRARY if part(module.name) in WITHOUT_TORCH))
    wrong = [target for target in importer if re.match(r"(torch|orchestra\.(train|parallel))(\.|$)", target)]
    assert [trail(importer, target) for target in wrong] == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count: they hide a circle from the interpreter, and not from a reader. Loading
    a module loads the packages around it.
    """
    graph = {}
    for module in modules().values():
        targets = imports(module)
        around = {package for target in targets for package in ancestors(target)}
        reached_first = {*targets, *around.difference(ancestors(module.name))}
        # Names outside our packages are ends.
        graph[module.name] = {target for target in reached_first if target in modules()} - {module.name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " → ".join(error.args[1]))


def test_nobody_imports_tests_or_benchmarks() -> None:
    for module in modules().values():
        tops = {target.split(".")[0] for target in imports(module)}
        assert not tops & {"tests", "benchmarks"}, module.name
