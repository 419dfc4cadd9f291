"""What torch.compile needs on which device, and what is said where it is lacking."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestra.sizes.compilation import (
    CompileTools,
    advice,
    is_wanted,
    lacking_tools,
    refusal,
    tools_here,
)

ALL = CompileTools(has_cxx=True, has_cc=True, has_triton=True, has_headers=True)


@pytest.mark.parametrize(
    ("chosen", "on_cpu", "on_gpu"), [("auto", False, True), (True, True, True), (False, False, False)]
)
def test_auto_compiles_on_gpus_alone(chosen: bool | str, on_cpu: bool, on_gpu: bool) -> None:
    assert (is_wanted(chosen, "cpu"), is_wanted(chosen, "cuda")) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("tool", "on_cpu", "on_gpu"),
    [
        ("has_cxx", ("a C++ compiler",), ()),
        ("has_cc", (), ("a C compiler",)),
        ("has_triton", (), ("Triton",)),
        ("has_headers", ("Python's headers",), ("Python's headers",)),
    ],
)
def test_each_device_needs_its_own_tools(tool: str, on_cpu: tuple[str, ...], on_gpu: tuple[str, ...]) -> None:
    tools = replace(ALL, **{tool: False})
    assert (lacking_tools("cpu", tools), lacking_tools("cuda", tools)) == (on_cpu, on_gpu)
    assert lacking_tools("cpu", ALL) == lacking_tools("cuda", ALL) == ()


def test_what_is_lacking_is_named_with_what_brings_it() -> None:
    words = advice(("a C compiler", "Triton"))
    assert words.startswith("a C compiler and Triton not found (install gcc or clang, or set CC; pip install")
    assert refusal(("Triton",)).endswith("or use train.compile=auto or train.compile=false")


def found() -> tuple[bool, bool]:
    """Return whether there is a compiler for C, and for C++."""
    return tools_here().has_cc, tools_here().has_cxx


def test_a_compiler_is_the_one_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert found() == (False, False)
    (tmp_path / "clang").touch(mode=0o755)
    (tmp_path / "mine").touch(mode=0o755)
    assert found() == (True, False)
    monkeypatch.setenv("CXX", "mine -O2")
    monkeypatch.setenv("CC", "another")
    assert found() == (False, True)
