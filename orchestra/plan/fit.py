"""Fits positive constants to positive measurements: damped Gauss-Newton in logarithms with a robust loss.

Each constant is pulled a little towards where it starts, so that one which no measurement decides stays
there. Plain Python, for a handful of constants; it knows nothing of what it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Constants = dict[str, float]
# Returns log(predicted ÷ measured) for each measurement.
Residuals = Callable[[Constants], Sequence[float]]

_STEP = 0.02
_ROUNDS = 25
# No constant moves further in one round than by this factor (in logarithms).
_FURTHEST = 0.7
_SETTLED = 1e-4


def fitted(residuals: Residuals, start: Constants, scale: float, pulls: Mapping[str, float]) -> Constants:
    """Return constants that minimise Σ ρ(residual) + Σ pull · log²(constant ÷ start); ρ is quadratic near 0
    and linear beyond `scale`.
    """
    names = list(start)
    origin = [math.log(start[name]) for name in names]
    weights_of_pull = [pulls[name] for name in names]

    def at(point: Sequence[float]) -> list[float]:
        return list(residuals({name: math.exp(it) for name, it in zip(names, point, strict=True)}))

    def loss(found: Sequence[float], point: Sequence[float]) -> float:
        robust = sum(2 * scale**2 * (math.sqrt(1 + (it / scale) ** 2) - 1) for it in found)
        moved = zip(weights_of_pull, point, origin, strict=True)
        return robust + sum(pull * (here - began) ** 2 for pull, here, began in moved)

    point, damping = list(origin), 1e-2
    now = at(point)
    for _ in range(_ROUNDS):
        slopes = [_slope(at, point, index, now) for index in range(len(names))]
        weights = [1 / math.sqrt(1 + (it / scale) ** 2) for it in now]
        gradient = [
            _dot3(slopes[index], weights, now) + weights_of_pull[index] * (point[index] - origin[index])
            for index in range(len(names))
        ]
        normal = [[_dot3(a, weights, b) for b in slopes] for a in slopes]
        for index, pull in enumerate(weights_of_pull):
            normal[index][index] = (normal[index][index] + pull) * (1 + damping)
        move = solved(normal, [-it for it in gradient])
        trial = [here + min(max(by, -_FURTHEST), _FURTHEST) for here, by in zip(point, move, strict=True)]
        then = at(trial)
        if loss(then, trial) < loss(now, point):
            is_settled = max(abs(a - b) for a, b in zip(trial, point, strict=True)) < _SETTLED
            point, now, damping = trial, then, damping / 3
            if is_settled:
                break
        else:
            damping *= 10
    return {name: math.exp(it) for name, it in zip(names, point, strict=True)}


def _slope(
    at: Callable[[Sequence[float]], list[float]], point: Sequence[float], index: int, now: Sequence[float]
) -> list[float]:
    shifted = [*point[:index], point[index] + _STEP, *point[index + 1 :]]
    return [(there - here) / _STEP for there, here in zip(at(shifted), now, strict=True)]


def _dot3(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    return sum(x * y * z for x, y, z in zip(a, b, c, strict=True))


def solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return x with matrix · x = right, by elimination with pivots. The matrix must be regular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(column + 1, size):
            factor = rows[index][column] / rows[column][column]
            for place in range(column, size + 1):
                rows[index][place] -= factor * rows[column][place]
    found = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][place] * found[place] for place in range(index + 1, size))
        found[index] = (rows[index][size] - known) / rows[index][index]
    return found
