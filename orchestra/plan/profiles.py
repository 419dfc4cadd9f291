"""Profiles of hardware that `orchestra plan --calibrate` writes and `cluster.hardware=FILE.json` names.

A profile holds the constants of one kind of device, fitted on runs there, and takes their place in a case; it
says what each was fitted from and how far its own runs are off. Of CPUs it holds figures for one core: a rank
has as many cores as it has threads, and less where ranks share cores. Reading and writing JSON only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from conf.schema import PrecisionName
from orchestra.errors import ConfigError
from orchestra.plan.case import PlanCase
from orchestra.plan.devices import Accelerator, Network
from orchestra.plan.frameworks import Framework

_VERSION = 1
CPU = "cpu"
SUFFIX = ".json"
# So much of a wrong value is shown.
_TOLD = 40

# Constants by name; those of precisions are called product_flops.<precision>.
Constants = dict[str, float]
OF_DEVICE = ("memory_bytes_per_s", "link_bytes_per_s", "attention_flops")
# What a core reaches while all cores of its node compute, of what it reaches alone: in products, and of
# memory traffic, which cores share. 1 where a profile does not say.
BUSY, BUSY_MEMORY = "busy_share", "busy_memory_share"
OF_NETWORK = ("inside_latency_s",)
OF_FRAMEWORK = ("host_layer_s", "step_s", "exposed_reduction", "fixed_bytes", "step_share")
PRODUCT = "product_flops."
# Without these there is nothing to plan for CPUs with: no row of a table replaces them.
_NEEDED_OF_CPUS = (*OF_DEVICE, *OF_NETWORK)

Place = TypeVar("Place", Accelerator, Network, Framework)


@dataclass(frozen=True)
class Residual:
    """One run that a profile was fitted on: measured and predicted."""

    run: str
    step_s: float
    predicted_step_s: float
    peak_bytes: float
    predicted_peak_bytes: float


@dataclass(frozen=True)
class Profile:
    """Constants of a kind of device. `cores` and `memory_bytes` are a node's, and of CPUs only.

    `peak_flops` is what MFU is a share of, by precision. `undecided` names the constants that no run of the
    fit had a say in: they are as they were.
    """

    device: str
    constants: Constants
    peak_flops: Mapping[str, float]
    cores: int | None = None
    memory_bytes: float | None = None
    source: str = ""
    undecided: Sequence[str] = field(default_factory=list)
    residuals: Sequence[Residual] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU


def is_profile(hardware: str) -> bool:
    """Whether `cluster.hardware` names a profile's file and not a row of the table."""
    return hardware.endswith(SUFFIX)


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps({"profile": _VERSION, **asdict(profile)}, indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError that names the file and every key that is not as it must be."""
    where = f"cluster.hardware={path}"
    advice = "write one with orchestra plan --calibrate RUN… --output FILE.json"
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not a profile: {error}; {advice}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: not a profile: {_told(record)}; expected an object; {advice}")
    if record.pop("profile", None) != _VERSION:
        raise ConfigError(f"{where}: not a profile of version {_VERSION}; {advice}")
    problems = _problems(record)
    if problems:
        raise ConfigError(
            [*(f"{where}: {each}" for each in problems[:-1]), f"{where}: {problems[-1]}; {advice}"]
        )
    residuals = [Residual(**each) for each in record.pop("residuals", [])]
    return Profile(residuals=residuals, **record)


def _problems(record: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a profile's keys, each with what is there and what was expected."""
    names = [each.name for each in fields(Profile)]
    problems = [
        f"{key}: there is no such key; expected {', '.join(names)}" for key in record if key not in names
    ]
    is_cpu = record.get("device") == CPU
    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "device": (lambda value: isinstance(value, str) and value != "", f"{CPU} or a device's name"),
        "constants": (lambda value: isinstance(value, dict), "an object of numbers"),
        "peak_flops": (lambda value: isinstance(value, dict), "an object of numbers by precision"),
        "cores": (
            lambda value: (isinstance(value, int) and _is_amount(value)) or (value is None and not is_cpu),
            "a whole number above 0",
        ),
        "memory_bytes": (
            lambda value: _is_amount(value) or (value is None and not is_cpu),
            "a number above 0",
        ),
        "source": (lambda value: isinstance(value, str), "a text"),
        "undecided": (
            lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
            "a list of names",
        ),
        "residuals": (
            lambda value: isinstance(value, list) and all(map(_is_residual, value)),
            "a list of residuals",
        ),
    }
    needed = {"device", "constants", "peak_flops", *(("cores", "memory_bytes") if is_cpu else ())}
    for key, (is_right, expected) in wanted.items():
        if (key in record or key in needed) and not is_right(record.get(key)):
            problems.append(f"{key}: {_told(record.get(key), key in record)}; expected {expected}")
    for key in ("constants", "peak_flops"):
        if isinstance(record.get(key), dict):
            problems += _wrong_numbers(key, record[key], is_cpu)
    return problems


def _wrong_numbers(key: str, numbers: Mapping[str, Any], is_cpu: bool) -> list[str]:
    precisions = [each.value for each in PrecisionName]
    of_products = [PRODUCT + each for each in precisions]
    constants = [*OF_DEVICE, BUSY, BUSY_MEMORY, *OF_NETWORK, *OF_FRAMEWORK, *of_products]
    known = precisions if key == "peak_flops" else constants
    needed = _NEEDED_OF_CPUS if is_cpu and key == "constants" else ()
    problems = [f"{key}.{name}: missing; expected a number above 0" for name in needed if name not in numbers]
    for name, value in numbers.items():
        if name not in known:
            problems.append(f"{key}.{name}: there is no such key; expected {', '.join(known)}")
        elif not _is_amount(value):
            problems.append(f"{key}.{name}: {_told(value)}; expected a number above 0")
    return problems


def _told(value: object, is_there: bool = True) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"found {text if len(text) <= _TOLD else text[:_TOLD] + '…'}" if is_there else "missing"


def _is_amount(value: object) -> bool:
    """Whether it is a number above 0 that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return value > 0 and math.isfinite(value)
    except OverflowError:
        return False


def _is_residual(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {each.name for each in fields(Residual)}:
        return False
    return isinstance(value["run"], str) and all(_is_amount(value[name]) for name in value if name != "run")


def cpu_device(profile: Profile, ranks: int, threads: int, precision: PrecisionName) -> Accelerator:
    """Return what one of `ranks` ranks on a node of CPUs has, with so many threads each.

    Raises ConfigError where the profile has no figures for the precision.
    """
    constants, cores = profile.constants, profile.cores or 1
    product, peak = _of_precision(profile, precision)
    own = threads * shared(profile, ranks, threads)
    computing = own * while_busy(profile, BUSY, ranks, threads)
    memory_bytes_per_s = constants["memory_bytes_per_s"] * own
    return Accelerator(
        name=CPU,
        peak_flops=peak * own,
        memory_bytes=(profile.memory_bytes or 0.0) / ranks,
        memory_bytes_per_s=memory_bytes_per_s * while_busy(profile, BUSY_MEMORY, ranks, threads),
        # Messages are sent by one thread, which needs a core like any other.
        link_bytes_per_s=constants["link_bytes_per_s"] * min(1.0, cores / ranks),
        product_flops=product * computing,
        attention_flops=constants["attention_flops"] * computing,
        data_sheet="a rank's share of a node's cores",
        reached=profile.source,
    )


def _of_precision(profile: Profile, precision: PrecisionName) -> tuple[float, float]:
    product = profile.constants.get(PRODUCT + precision.value)
    peak = profile.peak_flops.get(precision.value)
    if product is None or peak is None:
        known = [name.removeprefix(PRODUCT) for name in profile.constants if name.startswith(PRODUCT)]
        raise ConfigError(
            f"precision={precision.value}: the profile has figures for {', '.join(known) or 'nothing'} only; "
            "calibrate on runs with it"
        )
    return product, peak


def shared(profile: Profile, ranks: int, threads: int) -> float:
    """Return the share of a core that a thread has where all ranks of a node compute."""
    return min(1.0, (profile.cores or 1) / (ranks * threads))


def while_busy(profile: Profile, name: str, ranks: int, threads: int) -> float:
    """Return the share of its rate that a core keeps beside as many others as compute on the node."""
    cores = profile.cores or 1
    others = min(cores, ranks * threads) - 1
    return 1 - (1 - profile.constants.get(name, 1.0)) * others / max(1, cores - 1)


def cpu_network(profile: Profile, ranks: int, network: Network) -> Network:
    """Return gloo between ranks of one node: collectives reach the link's rate as it was fitted."""
    latency = profile.constants["inside_latency_s"] / min(1.0, (profile.cores or 1) / ranks)
    return replace(
        network,
        name="gloo",
        inside_all_reduce=1.0,
        inside_all_gather=1.0,
        inside_latency_s=latency,
        source=profile.source,
    )


def with_profile(case: PlanCase, profile: Profile, threads: int = 1) -> PlanCase:
    """Return the case with the profile's constants. `threads`: of a rank, on CPUs.

    Raises ConfigError where the profile says nothing of the precision.
    """
    constants, ranks = profile.constants, case.devices_per_node
    framework = replace(_changed(case.framework, OF_FRAMEWORK, constants), source=profile.source)
    if "host_layer_s" in constants and "host_layer_s" not in profile.undecided:
        framework = replace(framework, host_compiled_s=None)
    if profile.is_cpu:
        share = shared(profile, ranks, threads) * while_busy(profile, BUSY, ranks, threads)
        framework = replace(
            framework,
            host_layer_s=framework.host_layer_s / share,
            step_s=framework.step_s / share,
            computes_on_host=True,
        )
        return replace(
            case,
            device=cpu_device(profile, ranks, threads, case.precision),
            network=cpu_network(profile, ranks, case.network),
            framework=framework,
        )
    product, peak = _of_precision(profile, case.precision)
    return replace(
        case,
        device=replace(_changed(case.device, OF_DEVICE, constants), product_flops=product, peak_flops=peak),
        network=replace(_changed(case.network, OF_NETWORK, constants), source=profile.source),
        framework=framework,
    )


def _changed(place: Place, names: Sequence[str], constants: Constants) -> Place:
    """Return a place of constants with those of these names that a profile has."""
    changes: dict[str, Any] = {name: constants[name] for name in names if name in constants}
    return replace(place, **changes)
