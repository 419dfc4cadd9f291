"""Decides in one place what runs where: cheap tests first, and tests whose machine is not here say why.

A test's folder names its stage, and the folders that need something of the machine mark their tests.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from slurm.cluster.errors import ClusterError
from slurm.cluster.packages import missing_packages, require_namespaces

# Stages in the order they run: a mistake shows in the cheapest test that can see it.
STAGES = ("unit", "architecture", "golden", "ranks", "e2e", "slurm", "gpu")
# What the tests of a stage are marked with.
MARKERS = {"ranks": "ranks", "e2e": "ranks", "slurm": "slurm", "gpu": "gpu"}
HERE = Path(__file__).parent
PATIENCE_S = 3600
# Further examples of what other tests show: `make test-all` runs them too.
LEFT_OUT = HERE / "left_to_test_all.txt"

# An example may take as long as a busy machine needs: slowness is no wrong result.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# A shell without job control starts its background processes with SIGINT ignored, and that is inherited: no
# command that a test starts would hear Ctrl-C. A handler, even one that does nothing, is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)


# No test reads the user's own defaults, or finds another test's runs by their names.
os.environ["ORCHESTRA_CONFIG_DIR"] = f"{tempfile.gettempdir()}/no-orchestra-home"
_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def run_folders_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let each test remember its own folders of runs alone."""
    cache = tmp_path_factory.getbasetemp() / "caches" / str(next(_NUMBERS))
    monkeypatch.setenv("ORCHESTRA_CACHE_DIR", str(cache))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-run",
        default="",
        metavar="MARKERS",
        help="fail instead of skip tests with one of these markers (comma-separated) that cannot run here",
    )
    parser.addoption(
        "--patient",
        action="store_true",
        help="give each test an hour, whatever limit it has: it may wait for a processor",
    )
    parser.addoption(
        "--without-further",
        action="store_true",
        help=f"leave out the tests that {LEFT_OUT.relative_to(HERE.parent)} names, as `make test` does",
    )


# Before what `-k` and `-m` leave is all that was collected.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--without-further"):
        further = further_examples({item.nodeid for item in items})
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in further])
        items[:] = [item for item in items if item.nodeid not in further]
    for item in items:
        if marker := MARKERS.get(stage_of(item)):
            item.add_marker(marker)
        if config.getoption("--patient"):
            # Before a limit of the test's own.
            item.add_marker(pytest.mark.timeout(PATIENCE_S), append=False)
    items.sort(key=lambda item: STAGES.index(stage_of(item)))


def further_examples(collected: Collection[str]) -> set[str]:
    """Return the collected tests that `make test` leaves out. Raises UsageError for a line that names none of
    a collected file: whoever renames a test, or an example, would bring it back unseen.
    """
    lines = [line for line in LEFT_OUT.read_text().splitlines() if line and not line.startswith("#")]
    files = {name.partition("::")[0] for name in collected}
    found = set()
    for line in lines:
        if line.partition("::")[0] not in files:
            continue
        # All examples of a test, where the line names none.
        named = {name for name in collected if name == line or name.startswith(f"{line}[")}
        if not named:
            raise pytest.UsageError(f"{LEFT_OUT}: there is no {line}")
        found |= named
    return found


def pytest_collection_finish() -> None:
    """Take modules and tests, which stay, out of what each full garbage collection goes through; and quick
    products in fp8 for tests that have torch.
    """
    if "torch" in sys.modules:
        importlib.import_module("tests.support.fp8_products").register()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, is_here, reason in REQUIREMENTS:
        if item.get_closest_marker(marker) and not is_here():
            outcome = pytest.fail if marker in item.config.getoption("--must-run").split(",") else pytest.skip
            outcome(reason)


def stage_of(item: pytest.Item) -> str:
    """Return the folder of tests/ that an item lies in."""
    return item.path.relative_to(HERE).parts[0]


def has_gpu() -> bool:
    """Whether torch sees a CUDA device; torch is imported only when a test asks."""
    import torch

    return torch.cuda.is_available()


@cache
def can_mount() -> bool:
    """Whether this process may mount file systems; root in a container often may not."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return done.returncode == 0


@cache
def has_slurm() -> bool:
    """Whether slurm/devcluster can start a cluster here: root that may make namespaces, and its packages."""
    missing = missing_packages(accounting=True)
    if os.geteuid() != 0 or missing:
        return False
    try:
        require_namespaces()
    except ClusterError:
        return False
    return True


# Marker, whether this machine has what it needs, and the one reason that is given otherwise.
REQUIREMENTS = (
    ("gpu", has_gpu, "needs an NVIDIA GPU: torch sees no CUDA device here"),
    (
        "slurm",
        has_slurm,
        "needs root that may make namespaces, and Slurm's packages (`make test` as root installs them)",
    ),
    ("mount", can_mount, "needs root that may mount: mounting a tmpfs fails here"),
)
