"""`orchestra config [KEY]`: every key with its type, default, unit and meaning; a group with its presets."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from orchestra.cli.text.figures import wrapped
from orchestra.config.descriptions import (
    EXPERIMENT,
    KeyDescription,
    described_keys,
    described_presets,
    group_names,
    section_text,
)
from orchestra.config.keys import known_keys, unknown_key
from orchestra.errors import EXIT_DONE, ConfigError

_EXPLAINED = """\
  orchestra config                         every key: its values and default
  orchestra config train.micro_batch_size  one key
  orchestra config checkpoint              a group: its presets and keys
  orchestra config model                   presets of a group, for model=NAME
  orchestra config recovery.heart          all keys that begin so

Numbers may be written 1e6, 8k, 4M, 1B (decimal), 8Ki, 4Mi (binary), times 90s, 10m, 4h, 1d12h.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra config [KEY] [--json]"
    parser.add_argument("key", nargs="?", default="", metavar="KEY", help="a key, a group, or how keys begin")
    parser.add_argument("--json", action="store_true", help="print one JSON object: keys and presets by name")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Explain a key or a group and return 0. Raises ConfigError for one that does not exist."""
    name = arguments.key.rstrip("=.")
    keys = _keys(name)
    groups = [group for group in group_names() if name in ("", group)]
    if not keys and not groups:
        raise ConfigError(unknown_key(name))
    if arguments.json:
        presets = {group: described_presets(group) for group in groups}
        facts = {key.name: dataclasses.asdict(key) for key in keys}
        print(json.dumps({"keys": facts, "presets": presets}, indent=2))
        return EXIT_DONE
    print("\n".join(_overview() if not name else _explained(name, keys)))
    return EXIT_DONE


def _keys(name: str) -> list[KeyDescription]:
    """Return the key of this name, else those below it, else those whose names begin with it."""
    keys = described_keys()
    if name in keys:
        return [keys[name]]
    below = [key for key in keys.values() if not name or key.name.startswith(f"{name}.")]
    return below or [key for key in keys.values() if key.name.startswith(name)]


def _overview() -> Iterable[str]:
    for group in group_names():
        yield from wrapped(f"{group}: {section_text(group)}", indent="  ")
        yield from wrapped(f"presets: {', '.join(described_presets(group))}", "  ", "    ")
        yield from (f"  {key.name:<44} {key.default:<10} {_accepts(key)}" for key in _keys_of(group))
        yield ""


def _keys_of(group: str) -> list[KeyDescription]:
    return [] if group == EXPERIMENT else _keys(group)


def _explained(name: str, keys: Iterable[KeyDescription]) -> Iterable[str]:
    if name == EXPERIMENT or (name in known_keys() and known_keys()[name].is_section):
        yield from wrapped(section_text(name))
        for preset, comment in described_presets(name).items() if "." not in name else ():
            yield from wrapped(f"{name}={preset}: {comment}", "  ", "      ", keeps_words=True)
        yield ""
    for key in keys:
        yield f"{key.name}={key.default}"
        yield from wrapped(_accepts(key), "  accepts  ", " " * 11)
        yield from wrapped(key.meaning, "  ", "  ") if key.meaning else ()


def _accepts(key: KeyDescription) -> str:
    return f"{key.accepts} ({key.unit})" if key.unit else key.accepts
