"""What a linter cannot know of the style: how large things may be, names that say nothing or two things,
modules without purpose, machine paths. One test a rule.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from source_tree import ROOT, functions, modules, python_files, tree_of

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_MODULES = 16
# Those that keep torch, Hydra and wandb out of commands that do not need them.
MAX_INNER_IMPORTS_PER_1000_LINES = 2.0
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
# Where a developer's machine shows through: home folders and the like, but not patterns and examples.
MACHINE_PATH = re.compile(r"""["' (](/root|/home/\w+|/Users/\w+|/work)/""")
CLASSES = [
    node.name
    for module in modules().values()
    for node in ast.walk(module.tree)
    if isinstance(node, ast.ClassDef)
]


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
    full = {folder for folder, count in counts.items() if count > MAX_MODULES}
    assert sorted(full) == [], f"at most {MAX_MODULES} modules a folder: divide it"


def test_every_module_says_what_it_is() -> None:
    silent = [module.name for module in modules().values() if not ast.get_docstring(module.tree)]
    assert silent == [], "a module begins by saying what it is, and who calls it"


def test_names_of_modules_and_classes_say_what_they_are() -> None:
    empty = [name for name in modules() if name.split(".")[-1] in NAMES_THAT_SAY_NOTHING]
    assert (empty, [name for name in CLASSES if re.match(r"_?(Base|Abstract)[A-Z]", name)]) == ([], [])


def test_names_of_files_and_classes_mean_one_thing_in_the_product() -> None:
    files = [module.path.name for module in modules().values()]
    assert twice(file for file in files if not file.startswith("__")) == []
    assert twice(CLASSES) == []


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by their names."""
    assert twice(file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py") == []


def test_imports_inside_functions_are_few() -> None:
    inner = sum(
        isinstance(node, ast.Import | ast.ImportFrom)
        for module in modules().values()
        for function in functions(module.tree)
        for node in own_nodes(function)
    )
    lines = sum(len(module.path.read_text().splitlines()) for module in modules().values())
    assert inner <= MAX_INNER_IMPORTS_PER_1000_LINES * lines / 1000, f"{inner} imports inside functions"


def test_no_machine_shows_through() -> None:
    files = list(written_files())
    assert len(files) > len(modules())
    for file in files:
        match = MACHINE_PATH.search(file.read_text())
        assert match is None, f"{name(file)}: {match and match.group()}"


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


def written_files() -> Iterable[Path]:
    """Yield files of ours by their endings, without going into folders that others fill."""
    for folder, children, names in os.walk(ROOT):
        children[:] = [child for child in children if child not in {".venv", ".git", "runs", "dist"}]
        yield from (
            Path(folder, file)
            for file in names
            if file.endswith((".py", ".yaml", ".toml", ".md", "Makefile"))
        )
