"""How large things may be, and that each name means one thing. One test a rule."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from source_tree import ROOT, functions, imports, modules, python_files, tree_of

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_MODULES = 16
# A verb a file.
MAX_MODULES_OF = {"orchestra/cli": 20}
# Those that keep torch, Hydra and wandb out of commands that do not need them.
MAX_INNER_IMPORTS_PER_1000_LINES = 2.0


def test_files_are_short_enough_to_read() -> None:
    lengths = {name(file): len(file.read_text().splitlines()) for file in python_files()}
    assert {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short_enough_to_read() -> None:
    too_long = [
        f"{name(file)}: {function.name}"
        for file in python_files()
        for function in functions(tree_of(file))
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_folders_hold_few_modules() -> None:
    counts = Counter(
        name(module.path.parent) for module in modules().values() if module.path.name != "__init__.py"
    )
    full = {folder for folder, count in counts.items() if count > MAX_MODULES_OF.get(folder, MAX_MODULES)}
    assert sorted(full) == [], f"at most {MAX_MODULES} modules a folder: divide it"


def test_no_two_files_have_one_name() -> None:
    files = [module.path for module in modules().values()]
    named = twice(file.name for file in files if not file.name.startswith("__"))
    assert named == [], "a file's name means one thing in the product"


def test_no_two_classes_have_one_name() -> None:
    named = twice(
        node.name
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    assert named == [], "a class's name means one thing in the product"


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by their names."""
    assert twice(file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py") == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count: they hide a circle from the interpreter, and not from a reader."""
    graph = {
        module.name: {target for target in imports(module, with_lazy=True) if target in modules()}
        - {module.name}
        for module in modules().values()
    }
    assert circles_of(graph) == []


def test_imports_inside_functions_are_few() -> None:
    inner = sum(
        isinstance(node, ast.Import | ast.ImportFrom)
        for module in modules().values()
        for function in functions(module.tree)
        for node in own_nodes(function)
    )
    lines = sum(len(module.path.read_text().splitlines()) for module in modules().values())
    assert inner <= MAX_INNER_IMPORTS_PER_1000_LINES * lines / 1000, f"{inner} imports inside functions"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def twice(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted(each for each, count in Counter(names).items() if count > 1)


def own_nodes(function: ast.AST) -> Iterable[ast.AST]:
    """Yield what stands in a function, but not in functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes of which each reaches each other (Kosaraju), larger than one node."""
    order: list[str] = []
    visited: set[str] = set()
    for node in graph:
        walk(node, graph.__getitem__, visited, order)
    sources: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        for target in targets:
            sources[target].add(node)
    visited.clear()
    circles = []
    for node in reversed(order):
        circle: list[str] = []
        walk(node, sources.__getitem__, visited, circle)
        if len(circle) > 1:
            circles.append(sorted(circle))
    return circles


def walk(node: str, targets: Callable[[str], set[str]], visited: set[str], order: list[str]) -> None:
    """Append what is reached from a node and was not visited yet, each after all that it leads to."""
    if node in visited:
        return
    visited.add(node)
    for target in sorted(targets(node)):
        walk(target, targets, visited, order)
    order.append(node)
