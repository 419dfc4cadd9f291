"""Layouts one turn of a knob away from another: what changes, and what goes along. It predicts nothing."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.plan.cases.case import Case
from orchestra.plan.layouts.space import KNOBS, Choice, Space, choice_of, within


def turns(space: Space, case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the layouts that differ in one knob, whether they fit or not, with the knob's name.

    Where an axis of the mesh grows or shrinks, data parallelism takes up the rest.
    """
    here = choice_of(case)
    for knob in KNOBS:
        for other in _turned(space, here, knob):
            if other != here:
                yield knob, space.case(other)


def _turned(space: Space, here: Choice, knob: str) -> Iterator[Choice]:
    if knob == "zero":
        for zero in space.zero_stages(here.mesh):
            yield here._replace(zero=zero, shard_degree=here.shard_degree if zero else None)
    elif knob == "shard_degree":
        degrees = space.shard_degrees(here.mesh, here.zero)
        yield from (here._replace(shard_degree=degree) for degree in degrees)
    elif knob == "micro_batch_size":
        sizes = space.micro_batch_sizes(here.mesh)
        yield from (here._replace(micro_batch_size=size) for size in sizes)
    elif knob in ("recompute", "sequence_parallel"):
        for split, recompute in space.kinds(here.mesh):
            other = here._replace(sequence_parallel=split, recompute=recompute)
            rest = "recompute" if knob == "sequence_parallel" else "sequence_parallel"
            if getattr(other, rest) == getattr(here, rest):
                yield other
    elif knob in ("tp", "pp", "cp", "ep"):
        yield from _other_meshes(space, here, knob)


def _other_meshes(space: Space, here: Choice, axis: str) -> Iterator[Choice]:
    """Meshes in which only this axis and data parallelism differ, everything else as it is or as near."""
    for mesh in space.meshes():
        if any(getattr(mesh, it) != getattr(here.mesh, it) for it in ("tp", "pp", "cp", "ep") if it != axis):
            continue
        sizes = [size for size in space.micro_batch_sizes(mesh) if size <= here.micro_batch_size]
        kinds = [split for split, recompute in space.kinds(mesh) if recompute is here.recompute]
        if not sizes or not kinds:
            continue
        # Sequence parallelism as it is; where there was no tp before, as is usual: on.
        wanted = here.sequence_parallel or here.mesh.tp == 1
        split = wanted if wanted in kinds else kinds[0]
        stages = space.zero_stages(mesh)
        zero = here.zero if here.zero in stages else stages[-1]
        degree = within(here.shard_degree, mesh) if zero else None
        yield Choice(mesh, zero, split, here.recompute, sizes[-1], degree)
