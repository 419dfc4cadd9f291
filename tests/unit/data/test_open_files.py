"""A rank may open as many files as the system lets it: a blend of many parts needs more than at the start."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import resource
from orchestra.data.token_files import allow_many_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_many_files()
soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
assert now == hard and (soft > 256 or hard == 256), (soft, hard)
"""


def test_a_rank_raises_its_limit_of_open_files() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True)
