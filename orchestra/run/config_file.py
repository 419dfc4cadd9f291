"""Writes and reads the frozen `config.yaml` of a run as the typed schema. It composes and checks nothing.

Workers and the control plane read a run's configuration only through here, never the YAML tree it was made
from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.schema import Config
from orchestra import __version__
from orchestra.errors import ConfigError

_BOOLEANS = ("y", "yes", "n", "no", "true", "false", "on", "off")


def write_config(path: Path, config: Config) -> None:
    """Write every value of `config`, defaults too, as YAML."""
    path.write_text(to_yaml(config))


def to_yaml(config: Config) -> str:
    """Return every value of `config`, defaults too, as YAML."""
    return values_to_yaml(dataclasses.asdict(config))


def plain_values(config: Config) -> dict[str, Any]:
    """Return every value of `config` as JSON has it: sections by name, enums by their names."""
    return cast(
        dict[str, Any], json.loads(json.dumps(dataclasses.asdict(config), default=attrgetter("name")))
    )


def values_to_yaml(values: Any) -> str:
    """Return values of a configuration, or one of them, as YAML."""
    # What OmegaConf.to_yaml writes, twenty times as fast: sweeps freeze a configuration for each member.
    return str(
        yaml.dump(
            values,
            Dumper=_Dumper,
            default_flow_style=False,
            sort_keys=False,
            allow_unicode=True,
        )
    )


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes enums by name, and quotes texts that OmegaConf would read as something else."""

    def ignore_aliases(self, _: object) -> bool:
        return True

    def enum(self, value: Enum) -> yaml.Node:
        return self.represent_str(value.name)  # type: ignore[no-any-return]

    def text(self, value: str) -> yaml.Node:
        style = "'" if _is_number(value) or value.lower() in _BOOLEANS else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)  # type: ignore[no-any-return]


_Dumper.add_multi_representer(Enum, _Dumper.enum)
_Dumper.add_representer(str, _Dumper.text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_config(path: Path) -> Config:
    """Read a frozen configuration. Raises ConfigError naming the file when it is not one of this version."""
    try:
        merged = OmegaConf.merge(writable_schema(), OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except OmegaConfBaseException as error:
        # Below it stand names of types.
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: not a frozen configuration of orchestra {__version__}: {said}; use the version that "
            f"run.json beside it names"
        ) from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not a frozen configuration: {error}") from error
    return cast(Config, OmegaConf.to_object(merged))


def writable_schema() -> DictConfig:
    """Return the typed schema as a node that takes values; frozen dataclasses alone give a read-only one."""
    return copy.deepcopy(_schema())


@functools.cache
def _schema() -> DictConfig:
    """Return the node that is copied: reading the dataclasses takes five times as long as a copy (24 ms)."""
    schema = OmegaConf.structured(Config)
    OmegaConf.set_readonly(schema, False)
    return cast(DictConfig, _writable(schema))


def _writable(node: object) -> object:
    """Clear the read-only flags that frozen dataclasses leave on every section (omegaconf 2.3)."""
    if OmegaConf.is_config(node):
        OmegaConf.set_readonly(node, None)  # type: ignore[arg-type]
        if OmegaConf.is_dict(node):
            for key in node:  # type: ignore[attr-defined]
                _writable(node._get_node(key))  # type: ignore[attr-defined]
    return node
