"""Reads the repository's Python files as syntax: modules by name, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestra", "conf", "launchers", "checkpointing")


@dataclass(frozen=True)
class Module:
    """One Python file by its dotted name."""

    name: str
    path: Path
    is_package: bool
    tree: ast.Module


@cache
def modules() -> dict[str, Module]:
    """Return the modules of all packages by dotted name."""
    return {module.name: module for package in PACKAGES for module in modules_in(package)}


def modules_in(folder: str) -> list[Module]:
    """Return the modules below a folder of the repository."""
    return [_module(file) for file in sorted((ROOT / folder).rglob("*.py"))]


@cache
def python_files() -> list[Path]:
    """Return all Python files of the repository: packages, benchmarks, development cluster and tests."""
    folders = (*PACKAGES, "benchmarks", "slurm", "tests")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    """Return a file's syntax; each is read once for all rules."""
    return ast.parse(file.read_text(), str(file))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions in a piece of syntax, methods and inner ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _module(file: Path) -> Module:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, file, is_package, tree_of(file))


@cache
def imports(module: Module) -> frozenset[str]:
    """Return the dotted names that a module imports, inside functions too.

    `from a import b` counts as a.b where that is one of our modules, else as a. Imports for type checkers
    alone are left out.
    """
    found: set[str] = set()
    for node in _statements(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            found.update(
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base
                for alias in node.names
            )
    return frozenset(found)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from _statements(child)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def ancestors(name: str) -> list[str]:
    """Return the packages around a dotted name: a and a.b for a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def reached(*starts: str) -> dict[str, str]:
    """Return everything that importing and using `starts` may import, each with the module that imports it.

    Names outside our packages are ends; imports inside functions count, and so do packages around a module.
    """
    importer = dict.fromkeys(starts, "")
    queue = [*starts]
    while queue:
        name = queue.pop()
        direct = imports(modules()[name])
        around = {package for target in direct for package in ancestors(target) if package in modules()}
        targets = direct | around
        for target in sorted(targets - importer.keys()):
            importer[target] = name
            if target in modules():
                queue.append(target)
    return importer


def trail(importer: dict[str, str], name: str) -> str:
    """Return how `name` was reached, as `a → b → name`."""
    steps = [name]
    while importer[steps[-1]]:
        steps.append(importer[steps[-1]])
    return " → ".join(reversed(steps))
