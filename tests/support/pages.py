"""Reads README.md and the pages of docs/: their code blocks, commands and links.

The language of a code block says who runs it: `bash` on this machine (tests/e2e/test_docs.py), `sh` on a
cluster (tests/slurm/test_site_files.py), `yaml` is a site's file there; a block without a language shows
output.
"""

from __future__ import annotations

import re
from pathlib import Path

from orchestra.config.keys import known_keys

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# In the order in which they are read; the commands of one page use the runs of those before it.
_IN_ORDER = ("quickstart", "data", "slurm", "site", "parallelism", "recovery", "checkpoints", "planning")
PAGES = (README, *(DOCS / f"{name}.md" for name in _IN_ORDER))
PAGES = (*PAGES, *sorted(set(DOCS.rglob("*.md")) - set(PAGES)))
# What a path of the repository begins with.
_FOLDERS = ("orchestra", "conf", "launchers", "checkpointing", "slurm", "tests", "benchmarks", "docs")


def blocks(page: Path, language: str) -> list[str]:
    """Return the page's code blocks of one language; the empty language is that of shown output."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


def commands(language: str) -> list[str]:
    """Return the command lines of all pages' blocks of one language, without comments, in their order."""
    lines = [line for page in PAGES for block in blocks(page, language) for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def shown_commands() -> list[str]:
    """Return the commands that stand in shown output behind a prompt, `$ `."""
    shown = [block for page in PAGES for block in blocks(page, "")]
    return [line[2:] for block in shown for line in block.splitlines() if line.startswith("$ ")]


def links(page: Path) -> list[str]:
    """Return the targets of a page's relative links, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    return [target for target in local if target]


def named_keys(page: Path) -> list[str]:
    """Return the keys of the configuration that a page names in `code`, without what they are set to."""
    groups = "|".join(name for name, key in known_keys().items() if key.is_section and "." not in name)
    return re.findall(rf"`((?:{groups})\.[a-z_.]*[a-z_])(?=[`=\[])", page.read_text())


def named_targets(page: Path) -> list[str]:
    """Return the targets of the Makefile that a page names in `code`."""
    return re.findall(r"`make ([a-z-]+)", page.read_text())


def paths(page: Path) -> list[str]:
    """Return the repository's files and folders that a page names, each as it stands there in `code`."""
    return re.findall(rf"`((?:{'|'.join(_FOLDERS)})/[\w./-]*)", page.read_text())
