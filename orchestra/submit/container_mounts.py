"""What a container must show the ranks: the runs, the data, the weights to start from, and the checkpoints.

Pyxis takes mounts as an option of srun, apptainer in a variable; what others mount stands in their own words,
and a folder that is not among them is refused before the job waits in the queue. A folder counts as mounted
where a mount leads to it or to one above it, from wherever. Reads which folders exist; called on the login
node.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from conf.schema import Config, DataConfig
from orchestra.data.held_out import evaluates, held_out_data
from orchestra.data.token_files import local_prefix, token_file_prefix
from orchestra.errors import ConfigError

# Programs that take further mounts in a variable, with commas between.
_VARIABLES = {"apptainer": "APPTAINER_BIND", "singularity": "SINGULARITY_BIND"}
# Programs that mount nothing but what their own words say.
_OWN_WORDS = ("docker", "podman", "nerdctl", "ch-run", "enroot")
_OPTIONS = ("--bind", "--volume", "--mount", "-B", "-v", "-b", "-m")
_TARGETS = ("target", "dst", "destination")
_READ_ONLY = "ro"


@dataclass(frozen=True)
class _Folder:
    """A folder that the ranks need, the key that names it, and whether they write there."""

    path: Path
    key: str
    is_written: bool = False


@dataclass(frozen=True)
class _Mount:
    """Where a mount leads to inside the container."""

    target: PurePath
    is_read_only: bool

    def shows(self, folder: _Folder) -> bool:
        return folder.path.is_relative_to(self.target) and not (folder.is_written and self.is_read_only)


def image_mounts(config: Config, parent: Path) -> list[str]:
    """Return the mounts of an image in the words of Pyxis (SOURCE:TARGET[:ro]): `parent`, which holds the
    run, those of the configuration, and the folders that these leave out.
    """
    given = [_words(_Folder(parent, "run.dir", is_written=True)), *config.cluster.container.mounts]
    return [*given, *map(_words, _left_out(config, _mounts(given)))]


def prefix_variable(config: Config, parent: Path) -> tuple[str, str] | None:
    """Return the variable by which the program of cluster.container.prefix is told further mounts, and its
    value; None where it knows none, or needs none.
    """
    words = shlex.split(config.cluster.container.prefix or "")
    variable = next((_VARIABLES[name] for word in words if (name := PurePath(word).name) in _VARIABLES), None)
    mounted = _mounts(_binds(words))
    wanted = [_Folder(parent, "run.dir", is_written=True), *_left_out(config, mounted)]
    left = [folder for folder in wanted if not any(mount.shows(folder) for mount in mounted)]
    return (variable, ",".join(map(_words, left))) if variable and left else None


def mount_problems(config: Config, parent: Path) -> Iterator[str]:
    """Yield a sentence for each folder that the ranks would not find in their container."""
    container = config.cluster.container
    if container.image is None and container.prefix is None:
        return
    runs = _Folder(parent, "run.dir", is_written=True)
    folders = list(dict.fromkeys([runs, *_needed(config)]))
    for folder in folders:
        if folder.path == Path("/"):
            yield f"{folder.key} lies in no folder that exists and could be mounted but /; make one for it"
        elif any(sign in str(folder.path) for sign in ":,"):
            yield (
                f"{folder.key}={folder.path}: a colon or a comma in its name ends the word in which a "
                "container is told to mount it; use a folder without, or a link to this one"
            )
    try:
        words = shlex.split(container.prefix or "")
    except ValueError as error:
        yield f"cluster.container.prefix={container.prefix}: {error}; close what is quoted"
        return
    program = next((name for word in words if (name := PurePath(word).name) in _OWN_WORDS), None)
    if container.image is not None or program is None:
        return
    mounted = _mounts(_binds(words))
    for folder in folders:
        if not any(mount.shows(folder) for mount in mounted):
            mode = "" if folder.is_written else f":{_READ_ONLY}"
            yield (
                f"{folder.key}: {folder.path} is not mounted by cluster.container.prefix ({program}), and "
                f"the ranks need it{' to write there' if folder.is_written else ''}; mount {folder.path}:"
                f"{folder.path}{mode}"
            )


def _left_out(config: Config, mounted: Sequence[_Mount]) -> list[_Folder]:
    """Return the needed folders that no mount shows, none twice and none below another one of them."""
    left: list[_Folder] = []
    for folder in sorted(_needed(config), key=lambda needed: (len(needed.path.parts), not needed.is_written)):
        own = [_Mount(other.path, not other.is_written) for other in left]
        if not any(mount.shows(folder) for mount in (*mounted, *own)):
            left.append(folder)
    return left


def _needed(config: Config) -> Iterator[_Folder]:
    """Yield the folders of this machine that the configuration names beside run.dir."""
    init_from = config.model.init_from
    sources = {"data": config.data}
    # What is wrong with eval.data a rule of its own says.
    with contextlib.suppress(ConfigError):
        held_out = held_out_data(config) if evaluates(config) else {}
        sources |= {f"eval.data.{name}": data for name, data in held_out.items()}
    for key, path in ((key, path) for name, data in sources.items() for key, path in _paths(name, data)):
        prefix = None if path is None else local_prefix(token_file_prefix(path))
        if prefix is not None:
            yield from _of_files(key, [Path(f"{prefix}.bin"), Path(f"{prefix}.json")])
    if init_from is not None and Path(init_from).is_dir():
        yield from _of_files("model.init_from", sorted(Path(init_from).iterdir()))
    saved = config.checkpoint
    for key, given in (("checkpoint.dir", saved.dir), ("checkpoint.fallback_dir", saved.fallback_dir)):
        if given is not None and (local := local_prefix(given)) is not None:
            # It is made by the ranks: the nearest folder that exists is mounted, to make it in.
            place = Path(local)
            above = next(folder for folder in (place, *place.parents) if folder.is_dir())
            yield _Folder(above, key, is_written=True)


def _paths(name: str, data: DataConfig) -> list[tuple[str, str | None]]:
    return [(f"{name}.path", data.path), *((f"{name}.blend", part.path) for part in data.blend)]


def _of_files(key: str, files: Iterable[Path]) -> Iterator[_Folder]:
    """Yield the folders of files that are read, and those that links among them lead to."""
    for file in files:
        if file.exists():
            yield _Folder(file.parent, key)
            yield _Folder(file.resolve().parent, key)


def _words(folder: _Folder) -> str:
    return f"{folder.path}:{folder.path}{'' if folder.is_written else f':{_READ_ONLY}'}"


def _binds(words: Sequence[str]) -> Iterator[str]:
    """Yield what a program's words say of mounts: the value of each option that may be one."""
    for option, value in zip(words, (*words[1:], ""), strict=True):
        name, _, own = option.partition("=")
        if name in _OPTIONS:
            yield from (own or value).split(",")


def _mounts(words: Iterable[str]) -> list[_Mount]:
    mounts = []
    for word in words:
        # docker --mount: target=/data
        key, _, value = word.partition("=")
        if value:
            word = value if key in _TARGETS else ""
        source, _, rest = word.partition(":")
        target, _, flags = rest.partition(":")
        place = target if target.startswith("/") else source
        if place.startswith("/"):
            mounts.append(_Mount(PurePath(place), _READ_ONLY in flags.split("+")))
    return mounts
