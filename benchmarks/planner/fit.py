"""Fits positive constants to positive measurements: damped Gauss-Newton in logarithms with a robust loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Constants = dict[str, float]

_STEP = 0.02
_ROUNDS = 12
# Pull towards where the fit starts, in units of a row's weight: a constant that no row decides stays.
_PRIOR = 0.05
# No constant moves further in one round than by this factor (in logarithms).
_FURTHEST = 0.5


def fitted(
    predict: Callable[[Constants], Sequence[float]],
    measured: Sequence[float],
    start: Constants,
    scale: float,
) -> Constants:
    """Return constants that minimise Σ ρ(log(predicted ÷ measured)); ρ is linear above `scale`."""
    names = list(start)
    target = np.log(np.asarray(measured))
    origin = np.log(np.asarray([start[name] for name in names]))

    def residuals(point: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(point).tolist(), strict=True))
        return np.log(np.asarray(predict(constants))) - target

    def loss(found: np.ndarray, point: np.ndarray) -> float:
        robust = 2 * scale**2 * (np.sqrt(1 + (found / scale) ** 2) - 1)
        return float(robust.sum() + _PRIOR * ((point - origin) ** 2).sum())

    point, damping = origin, 1e-2
    now = residuals(point)
    for _ in range(_ROUNDS):
        shifts = np.eye(len(names)) * _STEP
        slopes = np.stack([(residuals(point + shift) - now) / _STEP for shift in shifts], axis=1)
        weights = 1 / np.sqrt(1 + (now / scale) ** 2)
        normal = slopes.T @ (slopes * weights[:, None]) + _PRIOR * np.eye(len(names))
        gradient = slopes.T @ (weights * now) + _PRIOR * (point - origin)
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        trial = point + np.clip(move, -_FURTHEST, _FURTHEST)
        then = residuals(trial)
        if loss(then, trial) < loss(now, point):
            settled = float(np.abs(trial - point).max()) < 1e-3
            point, now, damping = trial, then, damping / 3
            if settled:
                break
        else:
            damping *= 10
    return dict(zip(names, np.exp(point).tolist(), strict=True))
