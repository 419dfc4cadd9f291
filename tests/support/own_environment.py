"""A virtual environment that holds a clone and what its pyproject.toml declares, made in seconds.

Its packages are links to those of the tests' own environment: nothing is downloaded, unpacked or compiled.
What only the tests need is not there, so a product that imports it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(clone: Path) -> None:
    """Make `clone/.venv` as `make .venv/installed` leaves it: its packages and an editable install."""
    made = clone / ".venv"
    venv.EnvBuilder(symlinks=True).create(made)
    (packages,) = made.glob("lib/python*/site-packages")
    project = tomllib.loads((clone / "pyproject.toml").read_text())["project"]
    for found in closure(project["dependencies"]).values():
        for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            # Several packages share a folder such as `nvidia`.
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(found.locate_file(name))))
    # The tests' pip installs into the other environment; the build backend is imported from here.
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "-qq")
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python")]
    backend = Path(str(distribution("hatchling").locate_file("")))
    environment = {**os.environ, "PYTHONPATH": str(backend), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    install = [*pip, "install", "--ignore-installed", *options, "-e", str(clone)]
    subprocess.run(install, env=environment, check=True)
    (made / "installed").touch()


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """Return the installed packages that requirements ask for, and all that those need, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(each), "") for each in requirements]
    while left:
        wanted, extra = left.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = wanted.name.lower()
        found[name] = distribution(name)
        for its_extra in {"", *wanted.extras} - {each for of, each in seen if of == name}:
            seen.add((name, its_extra))
            left += [(Requirement(each), its_extra) for each in found[name].requires or []]
    return found
