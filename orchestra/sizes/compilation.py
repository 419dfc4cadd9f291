"""Whether blocks are compiled: what train.compile says, what a rank trains on, and what torch.compile needs.

On a CPU torch.compile writes C++. On a GPU it writes Triton kernels, and Triton compiles a small module in C
that starts them. Both are compiled against Python's headers. The rules ask before a run starts on this
machine, and the ranks ask on their nodes. It loads no torch, and nothing is compiled to find out.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

AUTO = "auto"
_INSTALLED_BY = {
    "a C++ compiler": "install g++ or set CXX",
    "a C compiler": "install gcc or clang, or set CC",
    "Triton": "pip install triton, in the version that this torch asks for",
    "Python's headers": "install the interpreter's development package, such as python3-dev",
}


@dataclass(frozen=True)
class CompileTools:
    """What of the tools of torch.compile a node has."""

    has_cxx: bool
    has_cc: bool
    has_triton: bool
    has_headers: bool


def tools_here() -> CompileTools:
    """Return what this process would find."""
    return CompileTools(
        has_cxx=_has_program(os.environ, "CXX", ("g++",)),
        has_cc=_has_program(os.environ, "CC", ("gcc", "clang")),
        has_triton=importlib.util.find_spec("triton") is not None,
        has_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    )


def _has_program(environment: Mapping[str, str], variable: str, usual: Sequence[str]) -> bool:
    """Return whether the program that a variable names is there, or one of the usual ones without it."""
    named = shlex.split(environment.get(variable, ""))[:1]
    return any(shutil.which(name) is not None for name in named or usual)


def lacking_tools(device_type: str, tools: CompileTools) -> tuple[str, ...]:
    """Return what torch.compile needs for `cpu` or `cuda` and a node does not have, in words."""
    is_gpu = device_type == "cuda"
    needed = {
        "a C compiler" if is_gpu else "a C++ compiler": tools.has_cc if is_gpu else tools.has_cxx,
        "Triton": tools.has_triton or not is_gpu,
        "Python's headers": tools.has_headers,
    }
    return tuple(name for name, is_there in needed.items() if not is_there)


def is_wanted(chosen: bool | str, device_type: str) -> bool:
    """Return whether train.compile asks for compiled blocks on `cpu` or `cuda`."""
    return chosen is True or (chosen == AUTO and device_type == "cuda")


def advice(lacking: Sequence[str]) -> str:
    """Return what is not there, and what would bring it."""
    return f"{' and '.join(lacking)} not found ({'; '.join(_INSTALLED_BY[name] for name in lacking)})"


def refusal(lacking: Sequence[str]) -> str:
    """Return the sentence for train.compile=true where something is lacking."""
    return f"train.compile=true: {advice(lacking)}; or use train.compile=auto or train.compile=false"
