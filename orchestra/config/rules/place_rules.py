"""Rules about where a run trains, and what it finds there: machines, Slurm jobs, devices and data files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from conf.schema import (
    BlendPart,
    Config,
    Device,
    LauncherName,
    Offload,
    PrecisionName,
    Requeue,
    Source,
    StateDType,
)
from launchers.slurm.batch_script import option_problems, srun_option_problems
from orchestra.config.keys import shown, written
from orchestra.config.machine import Situation, absolute, by_itself, world_size
from orchestra.data.token_files import (
    NAMES_OF_SOURCES,
    SOURCE_NAME,
    check_separator,
    check_size,
    local_prefix,
    names_of_parts,
    read_index,
    token_file_prefix,
    unlike_parts,
)
from orchestra.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, DataError
from orchestra.huggingface.folder import init_from_problems
from orchestra.plugins import is_plugin
from orchestra.run.paths import offload_folder
from orchestra.run.permissions import group_problem
from orchestra.sizes.compilation import lacking_tools, refusal, tools_here
from orchestra.sizes.flops import num_dense_layers, num_expert_parameters, num_parameters
from orchestra.sizes.topology import divisors, has_open_micro_batch, layout, listed
from orchestra.sizes.training_shape import saved_bytes_per_parameter
from orchestra.sizes.units import MIB, as_slurm_time, binary, slurm_time_s

# 256 byte values and the document separator.
_STDLIB_VOCABULARY = 257
# Tokens that the library of any Python has; whether it has more is counted, file by file.
_STDLIB_SURELY = 2**20
# How bash begins what it says of lines that it reads.
_OF_BASH = re.compile(r"^.*?bash: (?=line \d+: )")
# A whole line that ends the batch script or makes it another program: `exec 2>log` only moves what it writes.
_LEAVES = re.compile(r"\s*(?:exit(?:\s+\S+)?|exec\s+[^\s<>&\d{-].*?)\s*(?:;|#.*)?")
# Ranks on CPU compute; a few per core are slow but can show how a layout behaves.
_MAX_RANKS_PER_CORE = 8
# Slurm's warning was seen up to 28 s off its time, and so was the time limit itself.
SLACK_S = 30
# Commands that train on this machine.
_TRAINING_VERBS = ("run", "resume")
# Keys that say what an option of sbatch says.
_SAID_BY = {
    "partition": "cluster.partition",
    "time": "cluster.time_limit",
    "gpus_per_node": "cluster.gpus_per_node",
    "nodes": "cluster.nodes",
    "exclude": "cluster.exclude",
    "segment": "cluster.segment",
    "switches": "cluster.max_switches",
    "job_name": "run.name",
    "requeue": "cluster.requeue",
    "no_requeue": "cluster.requeue",
    "signal": "recovery.stop_timeout_s",
}


def rule_nodes(config: Config, _: Situation) -> Iterator[str]:
    cluster = config.cluster
    if cluster.launcher is LauncherName.local and cluster.nodes > 1:
        yield (
            f"cluster.nodes={cluster.nodes}: cluster.launcher=local is this machine alone; use "
            f"cluster.nodes=1, or `orchestra submit` with cluster=slurm"
        )


def rule_ranks_per_node(config: Config, _: Situation) -> Iterator[str]:
    ranks = config.cluster.gpus_per_node
    if ranks != "auto" and (isinstance(ranks, str) or ranks < 1):
        yield f"cluster.gpus_per_node={ranks} is not a number of ranks; use 1 or more, or auto"


def rule_gpus(config: Config, situation: Situation) -> Iterator[str]:
    cluster, num_gpus = config.cluster, situation.num_gpus
    if (
        cluster.launcher is not LauncherName.local
        or cluster.device is not Device.cuda
        or situation.verb == "plan"
    ):
        return
    ranks = cluster.gpus_per_node
    if num_gpus == 0:
        yield "cluster.device=cuda, but no NVIDIA GPU is visible on this machine; use cluster.device=cpu"
    elif isinstance(ranks, int) and ranks > num_gpus and not cluster.share_devices:
        yield (
            f"cluster.gpus_per_node={ranks}, but {num_gpus} GPU(s) are visible on this machine; use at most "
            f"{num_gpus}, or cluster.share_devices=true to put several ranks on one, or cluster.device=cpu"
        )


def rule_share_devices(config: Config, _: Situation) -> Iterator[str]:
    cluster = config.cluster
    if cluster.share_devices and cluster.launcher is LauncherName.slurm and cluster.device is not Device.cpu:
        yield (
            "cluster.share_devices=true is to try a layout on one machine: on Slurm each rank is given a GPU "
            "of its own; leave it out, or use cluster=local"
        )


def rule_cores(config: Config, situation: Situation) -> Iterator[str]:
    """Ranks on CPU that would only wait for each other."""
    ranks, cores = config.cluster.gpus_per_node, situation.num_cores
    if not _starts_on_cpu(config) or cores is None or not isinstance(ranks, int):
        return
    most = cores * _MAX_RANKS_PER_CORE
    if ranks > most:
        yield (
            f"cluster.gpus_per_node={ranks} ranks on {cores} usable core(s) of this machine; use at most "
            f"{most} ({_MAX_RANKS_PER_CORE} per core)"
        )


def rule_memory(config: Config, situation: Situation) -> Iterator[str]:
    """Parameters, gradients and optimizer state of all ranks on CPU must fit this machine's memory."""
    ranks, memory, model = world_size(config), situation.memory_bytes, config.model
    if not _starts_on_cpu(config) or memory is None or ranks is None or model.num_attention_heads < 1:
        return
    if any(rule_cores(config, situation)):
        return
    parameters = num_parameters(model)
    needed = trained_bytes(config, ranks)
    if needed > memory:
        fewer = "a smaller model or fewer ranks (cluster.gpus_per_node)"
        if config.parallelism.zero < 3 and ranks > 1:
            fewer += ", or parallelism=zero3"
        yield (
            f"model={model.name}: {parameters:,} parameters × {needed / (parameters * ranks):.4g} bytes "
            f"(parameter, gradient, optimizer state) × {ranks} rank(s) on CPU = {needed // MIB:,} MiB, but "
            f"this machine has {memory // MIB:,} MiB; use {fewer}"
        )


def trained_bytes(config: Config, ranks: int) -> int:
    """Return the bytes of parameters, gradients and optimizer state on all ranks together.

    0 where the layout is wrong, which another rule says. What else a step needs comes on top.
    """
    try:
        degrees = layout(config.parallelism, ranks)
    except ConfigError:
        return 0
    zero, precision = config.parallelism.zero, config.precision.name
    moments = saved_bytes_per_parameter(config) - 4
    parameter, gradient, state = 4, 4, moments
    if precision is not PrecisionName.fp32:
        # 16-bit parameters, with masters in fp32.
        parameter, gradient, state = 2, 2, moments + 4
        if precision is PrecisionName.bf16_fp32_grad:
            gradient = 4
    if config.parallelism.offload is Offload.optimizer_disk:
        state = 0
    widths = ((parameter, 3), (gradient, 2), (state, 1))
    model = config.model
    experts = (model.num_hidden_layers - num_dense_layers(model)) * num_expert_parameters(model)
    # Where ZeRO shards experts it does so among the ranks that share them out, over as many in all.
    parts = ((num_parameters(model) - experts, 1), (experts, config.parallelism.ep))
    each = sum(
        size * width / (degrees.shard if zero >= stage else whole)
        for size, whole in parts
        for width, stage in widths
    )
    return round(each * ranks / (degrees.tp * degrees.pp))


def _starts_on_cpu(config: Config) -> bool:
    return config.cluster.launcher is LauncherName.local and config.cluster.device is Device.cpu


def rule_precision_on_cpu(config: Config, _: Situation) -> Iterator[str]:
    name = config.precision.name
    if config.cluster.device is Device.cpu and name is PrecisionName.fp8:
        yield (
            "precision=fp8 needs a GPU of compute capability 8.9 or more; use precision=fp32 or bf16, or "
            "cluster.device=cuda"
        )


def rule_compile_tools(config: Config, situation: Situation) -> Iterator[str]:
    """What train.compile=true needs on this machine; the ranks look for themselves on the nodes of a job."""
    if config.train.compile is not True or not situation.starts_here or situation.verb not in _TRAINING_VERBS:
        return
    if lacking := lacking_tools(config.cluster.device.name, tools_here()):
        yield refusal(lacking)


def rule_offload_on_cpu(config: Config, _: Situation) -> Iterator[str]:
    offload = config.parallelism.offload
    if config.cluster.device is Device.cpu and offload in (Offload.optimizer, Offload.all):
        yield (
            f"parallelism.offload={offload.name} moves state from GPUs to host memory, and with "
            "cluster.device=cpu it lies there already; use parallelism.offload=none, or optimizer_disk to "
            "keep it on a disk"
        )


def rule_offload_disk(config: Config, situation: Situation) -> Iterator[str]:
    """State on disk needs a folder; here it must have room, on other nodes the ranks look for themselves."""
    parallelism, every_steps = config.parallelism, config.recovery.memory_copy_every_steps
    if parallelism.offload is not Offload.optimizer_disk:
        return
    if every_steps is not None:
        yield (
            f"recovery.memory_copy_every_steps={every_steps} copies in memory the state that "
            "parallelism.offload=optimizer_disk keeps out of it; use null, or parallelism.offload=none"
        )
    given = parallelism.offload_dir
    if given is None or not given.startswith(("/", "$")):
        yield (
            f"parallelism.offload_dir={shown(given)} with parallelism.offload=optimizer_disk; give the "
            "absolute path of a folder on each node's own disk, such as /scratch or '$TMPDIR'"
        )
    elif situation.starts_here and situation.verb in _TRAINING_VERBS:
        yield from _problems_of_offload(config, given)


def _problems_of_offload(config: Config, given: str) -> Iterator[str]:
    folder = Path(offload_folder(config.parallelism) or given)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        found = "cannot be written to" if folder.is_dir() else "is no folder of this machine"
        yield f"parallelism.offload_dir={given} {found}; make it, or give another one"
        return
    ranks = world_size(config)
    if ranks is None or config.model.num_attention_heads < 1:
        return
    needed = state_on_disk_bytes(config, ranks)
    free = shutil.disk_usage(folder).free
    if needed > free:
        yield (
            f"parallelism.offload_dir={given}: masters, moments and the image of a checkpoint take "
            f"{binary(needed)}, but {binary(free)} are free there; free some, give another folder, or share "
            "the state among the ranks (parallelism.zero=1 or more)"
        )


def state_on_disk_bytes(config: Config, ranks: int) -> int:
    """Return what all ranks together keep in `parallelism.offload_dir`, an image of a checkpoint included.

    0 where the layout is wrong, which another rule says.
    """
    try:
        degrees = layout(config.parallelism, ranks)
    except ConfigError:
        return 0
    count = num_parameters(config.model)
    images = 0 if config.checkpoint.every_steps is None else 1
    # fp32 masters and two moments.
    each = 8 if config.optim.state_dtype is StateDType.bf16 else 12
    return round(count * each * (degrees.replicate + images))


def existing_part(path: Path) -> Path:
    """Return the path, or what is there of it, as far as one may look."""
    return next(part for part in (path, *path.parents) if os.path.exists(part))  # noqa: PTH110  no error


def rule_local_folders(config: Config, _: Situation) -> Iterator[str]:
    for name, folder in (("run.dir", config.run.dir), ("data.cache_dir", config.data.cache_dir)):
        if folder is not None and "://" in folder:
            yield f"{name}={folder} is a URL; give the path of a folder, such as /tmp/orchestra"
        elif folder is not None and folder.strip():
            existing = existing_part(Path(absolute(folder)))
            if not existing.is_dir():
                yield f"{name}={folder}: {existing} is not a folder; give the path of one"


def rule_slurm_folders(config: Config, _: Situation) -> Iterator[str]:
    """Slurm reads names of log files: sbatch and srun each put in what follows a percent sign, and leave out
    what a backslash hides.
    """
    # A relative folder lies below the working directory.
    folder = os.path.abspath(config.run.dir)  # noqa: PTH100  text, not a file
    signs = [sign for sign in "%\\" if sign in folder]
    if signs and config.cluster.launcher is LauncherName.slurm:
        yield (
            f"run.dir={folder} holds {' and '.join(signs)}, which Slurm reads as something else in the names "
            "of a job's log files; choose a folder without"
        )


def rule_run_group(config: Config, situation: Situation) -> Iterator[str]:
    group = config.run.group
    if group is not None and situation.verb in ("run", "submit") and (problem := group_problem(group)):
        yield problem


def rule_data_source(config: Config, _: Situation) -> Iterator[str]:
    data = config.data
    if not is_plugin(data.source) and data.source not in Source.__members__:
        yield (
            f"data.source={data.source}: expected {', '.join(Source.__members__)} or a plug-in, "
            "package.module:name"
        )
    if data.source != Source.tokens:
        if data.path is not None or data.blend:
            said = "data=stdlib" if data.source == Source.stdlib else f"data.source={data.source}"
            yield f"data.path and data.blend are for data=tokens; choose it, or leave them out for {said}"
    elif data.path is None and not data.blend:
        yield "data.source=tokens needs files of `orchestra data pack`; give data.path=PREFIX or data.blend"
    elif data.path is not None and data.blend:
        yield "data.path and data.blend are both given; give one of them"
    for part in data.blend:
        if not 0 < part.weight < float("inf"):
            yield f"data.blend: weight {part.weight} of {part.path} is not a positive number; use one above 0"
        if part.name is not None and not SOURCE_NAME.fullmatch(part.name):
            yield f"data.blend: name {part.name} of {part.path}: {NAMES_OF_SOURCES}"
    names = names_of_parts(data.blend)
    for name in sorted(name for name in set(names) if names.count(name) > 1):
        yield f"data.blend: {names.count(name)} parts are called {name}; give each a name, name: NAME"


def rule_data_files(config: Config, _: Situation) -> Iterator[str]:
    """Local files must be there, and the model must know every token in them."""
    vocab_size = config.model.vocab_size
    if config.data.source == Source.stdlib:
        if vocab_size < _STDLIB_VOCABULARY:
            yield (
                f"model.vocab_size={vocab_size} is below the {_STDLIB_VOCABULARY} tokens of "
                f"data.source=stdlib (256 byte values, one separator); use {_STDLIB_VOCABULARY} or more"
            )
        if config.train.seq_len >= _STDLIB_SURELY:
            yield from _beyond_stdlib(config.train.seq_len)
        return
    for path in filter(None, (config.data.path, *(part.path for part in config.data.blend))):
        yield from problems_of_token_file(path, config, "data")
    yield from problems_of_blend(config.data.blend, "data.blend")


def _beyond_stdlib(seq_len: int) -> Iterator[str]:
    # numpy is loaded for it.
    from orchestra.data.source import num_stdlib_tokens

    if seq_len >= (num_tokens := num_stdlib_tokens()):
        yield (
            f"train.seq_len={seq_len} needs {seq_len + 1} tokens for one sample, but data.source=stdlib "
            f"holds {num_tokens} here; lower it or use data=tokens"
        )


def problems_of_blend(parts: Sequence[BlendPart], key: str) -> Iterator[str]:
    """Yield what keeps the parts of a blend from being read together, of those that lie here."""
    known = []
    for part in parts:
        local = local_prefix(token_file_prefix(part.path))
        # Another rule tells of an index that cannot be read.
        with contextlib.suppress(DataError):
            if local is not None:
                known.append((f"{local}.bin", read_index(Path(f"{local}.json"))))
    if known and (problem := unlike_parts(known, key)):
        yield problem


def problems_of_token_file(path: str, config: Config, section: str) -> Iterator[str]:
    """Yield what keeps a model from reading the token file at `path`, which a section of the configuration
    names; nothing of one that is somewhere else.
    """
    local = local_prefix(token_file_prefix(path))
    if local is None:
        return
    binary, index_file = Path(f"{local}.bin"), Path(f"{local}.json")
    try:
        missing = [str(name) for name in (binary, index_file) if not name.is_file()]
    except OSError as error:
        yield f"{section}: {error.filename}: cannot be read: {error.strerror}; give files that you may read"
        return
    if missing:
        yield f"{section}: no file {' and no file '.join(missing)}; write them with `orchestra data pack`"
        return
    try:
        index = read_index(index_file)
        check_size(binary.stat().st_size, index, str(binary))
        if config.data.document_masks:
            check_separator(index, str(binary))
    except DataError as error:
        yield f"{section}: {error}"
        return
    vocab_size, seq_len = config.model.vocab_size, config.train.seq_len
    if index.vocab_size > vocab_size:
        yield f"model.vocab_size={vocab_size} is below the {index.vocab_size} tokens of {binary}; raise it"
    if index.num_tokens <= seq_len:
        yield (
            f"train.seq_len={seq_len} needs {seq_len + 1} tokens for one sample, but {binary} holds "
            f"{index.num_tokens}; lower it or pack more text"
        )


def rule_init_from(config: Config, situation: Situation) -> Iterator[str]:
    """The weights to start from must be the model's; a plan needs none, nor does a run that goes on. One that
    begins after another finds them then, or its ranks say that they do not.
    """
    place = config.model.init_from
    may_come = situation.follows and place is not None and not Path(place).exists()
    if situation.verb in ("run", "submit") and not may_come:
        yield from init_from_problems(config)


def warning_lead_s(config: Config) -> int:
    """Return how long before its time limit a job is warned: long enough for the save that follows."""
    return math.ceil(config.recovery.stop_timeout_s) + SLACK_S


def rule_launcher(config: Config, situation: Situation) -> Iterator[str]:
    is_slurm = config.cluster.launcher is LauncherName.slurm
    if is_slurm and situation.verb == "run":
        yield (
            "cluster.launcher=slurm: `orchestra run` trains on this machine; use `orchestra submit` for a "
            "job on the cluster, or cluster=local"
        )
    elif not is_slurm and situation.verb == "submit":
        yield (
            "cluster.launcher=local is this machine alone; use cluster=slurm to submit a job, or "
            "`orchestra run` to train here"
        )


def rule_time_for_warning(config: Config, _: Situation) -> Iterator[str]:
    cluster = config.cluster
    if cluster.launcher is not LauncherName.slurm or cluster.time_limit is None:
        return
    try:
        limit_s = slurm_time_s(cluster.time_limit)
    except ValueError:
        return
    stop_s, lead_s = config.recovery.stop_timeout_s, warning_lead_s(config)
    least_s = lead_s + math.ceil(stop_s)
    if limit_s is not None and limit_s < least_s:
        yield (
            f"cluster.time_limit={cluster.time_limit} leaves no time to train: the job is warned {lead_s} s "
            f"before its end (recovery.stop_timeout_s={stop_s:g} for a save, {SLACK_S} s because Slurm is "
            f"not exact), and a save takes up to that; use {math.ceil(least_s / 60)} minutes or more, or "
            f"lower recovery.stop_timeout_s"
        )


def rule_switches(config: Config, _: Situation) -> Iterator[str]:
    """Where in the network a job's nodes are to lie."""
    cluster, wait = config.cluster, config.cluster.max_switches_wait
    if wait is not None and cluster.max_switches is None:
        yield f"cluster.max_switches_wait={wait} is for cluster.max_switches; give that too, or neither"
    try:
        if wait is not None and slurm_time_s(as_slurm_time(wait)) is None:
            raise ValueError
    except ValueError:
        yield f"cluster.max_switches_wait={wait} is no time; use minutes, H:MM:SS, D-HH:MM:SS or e.g. 2h"
    segment, total = cluster.segment, cluster.nodes + cluster.spare_nodes
    if segment is not None and cluster.min_nodes not in (None, cluster.nodes):
        yield (
            f"cluster.segment={segment} wants a number of nodes, not {cluster.min_nodes} to {cluster.nodes} "
            f"(cluster.min_nodes); leave one of them out"
        )
    elif segment is not None and segment > 0 and total % segment:
        fitting = listed([size for size in divisors(total) if size > 1] or [1]) if total > 0 else 1
        yield (
            f"cluster.segment={segment} does not divide the job's {total} nodes (cluster.nodes + "
            f"cluster.spare_nodes), as Slurm demands; use {fitting}"
        )


def rule_slurm_extra(config: Config, _: Situation) -> Iterator[str]:
    extra = config.cluster.slurm_extra
    for name in ("account", "qos", "constraint"):
        given = getattr(config.cluster, name)
        if name in extra and given is not None:
            yield f"cluster.slurm_extra.{name}: cluster.{name}={given} says that too; leave one of them out"
    named = {name: _SAID_BY.get(name.removeprefix("--").replace("-", "_")) for name in extra}
    for name, key in named.items():
        if key is not None:
            yield f"cluster.slurm_extra.{name}: {key} says that; set it there"
    for problem in option_problems({name: extra[name] for name, key in named.items() if key is None}):
        yield f"cluster.slurm_extra.{problem}; leave it out"


def rule_gpus_of_extra(config: Config, _: Situation) -> Iterator[str]:
    """GPUs in the site's own words take the place of those that follow from the ranks."""
    cluster = config.cluster
    ranks = cluster.gpus_per_node
    if cluster.device is Device.cpu or cluster.share_devices or not isinstance(ranks, int):
        return
    for name, value in cluster.slurm_extra.items():
        option = name.removeprefix("--").replace("-", "_")
        given = _gpus_of_option(option, value)
        needed, where = (ranks * cluster.nodes, "the job") if option == "gpus" else (ranks, "a node")
        if given is not None and given < needed:
            gpus = f"{given} GPU{'' if given == 1 else 's'}"
            yield (
                f"cluster.slurm_extra.{name}={shown(value)} gives {where} {gpus}, and its {needed} ranks "
                f"(cluster.gpus_per_node={ranks}) want one each; make them the same"
            )


def _gpus_of_option(option: str, value: object) -> int | None:
    """Return how many GPUs an option of sbatch asks for: gres=gpu:h100:2 or gpu; gpus=4 or h100:4. None where
    it is about something else.
    """
    if option not in ("gres", "gpus", "gpus_per_task") or value in (None, False):
        return None
    words = value if isinstance(value, list) else str(value).split(",")
    split = [re.split("[:=]", re.sub("^gres[:/]", "", str(word).strip()).partition("(")[0]) for word in words]
    # Of a gres the name is in front.
    own = [word[1:] for word in split if word[0] == "gpu"] if option == "gres" else split
    counts = [int(word[-1]) if word and word[-1].isdecimal() else 1 for word in own]
    return sum(counts) if counts else None


def rule_setup_lines(config: Config, _: Situation) -> Iterator[str]:
    """Whether bash can read the lines: else the job would end with them, long after it was submitted."""
    lines = "\n".join(config.cluster.setup).split("\n")
    if config.cluster.launcher is LauncherName.local or not config.cluster.setup:
        return
    if problem := _unread("\n".join(lines)):
        yield f"cluster.setup: bash cannot read it ({problem}); close what is opened there"
        return
    for number, (before, line) in enumerate(itertools.pairwise(["", *lines]), start=1):
        is_continued = before.rstrip().endswith(("\\", "||", "&&"))
        # Where bash lacks an end up to here, it belongs to a condition, a loop or a function.
        if not is_continued and _LEAVES.fullmatch(line) and _unread("\n".join(lines[:number])) is None:
            yield (
                f"cluster.setup: line {number} `{line.strip()}` leaves the batch script before any rank is "
                "started; leave it out, or make it depend on something"
            )


# The members of a sweep have the same lines.
@functools.lru_cache(maxsize=16)
def _unread(text: str) -> str | None:
    """Return what bash says against some lines; it runs nothing of them, a `shopt -s extglob` neither."""
    bash = shutil.which("bash")
    if bash is None:
        return None
    command = ["env", "LC_ALL=C", bash, "-O", "extglob", "-n"]
    read = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    problem = next((line for line in read.stderr.splitlines() if _OF_BASH.match(line)), None)
    return problem and _OF_BASH.sub("", problem)


def rule_container_mounts(config: Config, _: Situation) -> Iterator[str]:
    container = config.cluster.container
    if container.mounts and container.image is None:
        where = "name an image" if container.prefix is None else "mount them in cluster.container.prefix"
        yield (
            f"cluster.container.mounts={written(container.mounts)} belongs to cluster.container.image, and "
            f"there is none; {where}, or leave it out"
        )


def rule_srun_extra(config: Config, _: Situation) -> Iterator[str]:
    for problem in srun_option_problems(config.cluster.srun_extra):
        yield f"cluster.srun_extra.{problem}; leave it out"


def rule_array_throttle(config: Config, _: Situation) -> Iterator[str]:
    throttle = config.cluster.array_throttle
    if throttle is not None and throttle < 1:
        yield f"cluster.array_throttle={throttle} lets no job of a sweep run; use 1 or more, or leave it out"
    elif throttle is not None and config.cluster.launcher is LauncherName.local:
        yield (
            f"cluster.array_throttle={throttle} is for sweeps on Slurm (`orchestra submit -m`); here "
            f"cluster.members_at_once={throttle} says how many members train at a time (1 by default); "
            "leave it out, or set cluster.array_throttle=null where a run has it"
        )


def rule_stop_exit_code(config: Config, _: Situation) -> Iterator[str]:
    code = config.cluster.stop_exit_code
    if code not in (EXIT_DONE, EXIT_STOPPED):
        yield (
            f"cluster.stop_exit_code={code}: a stopped job ends with {EXIT_STOPPED}, which Slurm calls "
            f"FAILED, or with {EXIT_DONE}"
        )


def rule_members_at_once(config: Config, situation: Situation) -> Iterator[str]:
    cluster, number = config.cluster, config.cluster.members_at_once
    if number < 1:
        yield f"cluster.members_at_once={number} lets no member of a sweep train; use 1 or more"
    elif number > 1 and cluster.launcher is LauncherName.slurm:
        yield (
            f"cluster.members_at_once={number} is for sweeps on this machine (`orchestra run -m`); on Slurm "
            f"cluster.array_throttle={number} limits how many members train at a time"
        )
    elif situation.is_alone:
        return
    elif number > 1 and has_open_micro_batch(config.train) and _shares_memory(config):
        yield _each_would_fill("members_at_once", number, "this machine")
    elif number > 1 and cluster.device is Device.cuda and situation.num_gpus:
        each, visible = cluster.gpus_per_node, situation.num_gpus
        if isinstance(each, int) and each * number > visible and not cluster.share_devices:
            yield (
                f"cluster.members_at_once={number} members × {each} GPU(s) of their own, but {visible} "
                f"GPU(s) are visible on this machine; use fewer, or a smaller cluster.gpus_per_node"
            )


def _shares_memory(config: Config) -> bool:
    """Whether members that train at a time share memory in which no part is theirs."""
    return config.cluster.device is Device.cpu or config.cluster.share_devices


def _each_would_fill(key: str, number: int, what: str) -> str:
    return (
        f"cluster.{key}={number}: {number} members share the memory of {what}, and each would fill it with "
        f"train.micro_batch_size=auto; give a number"
    )


def rule_members_per_node(config: Config, situation: Situation) -> Iterator[str]:
    cluster, members = config.cluster, config.cluster.members_per_node
    if (isinstance(members, str) and members != "auto") or (isinstance(members, int) and members < 1):
        yield f"cluster.members_per_node={members} is no number of members; use 1 or more, or auto"
        return
    if members == 1:
        return
    given = f"cluster.members_per_node={members}"
    if cluster.launcher is LauncherName.local:
        yield f"{given} is for sweeps on Slurm (`orchestra submit -m`); here it is cluster.members_at_once"
    if situation.is_alone:
        # A single run has its nodes for itself, whatever a site's file says of sweeps.
        return
    if cluster.nodes > 1 or cluster.spare_nodes:
        what = "cluster.spare_nodes" if cluster.nodes == 1 else "cluster.nodes"
        number = cluster.spare_nodes or cluster.nodes
        yield (
            f"{given}: members that share a node have one each, and {what}={number}; use one node, or "
            f"cluster.members_per_node=1"
        )
    if cluster.requeue is Requeue.chain:
        yield (
            f"{given}: jobs that several members share are queued again by Slurm itself, not chained; use "
            f"cluster.requeue=requeue, or never"
        )
    if members == "auto" and cluster.device is Device.cpu:
        yield f"{given}: on CPU nobody counts what fits; give a number"
    elif isinstance(members, int) and cluster.device is Device.cpu and has_open_micro_batch(config.train):
        yield _each_would_fill("members_per_node", members, "a node")


def rule_alternatives(config: Config, _: Situation) -> Iterator[str]:
    if config.cluster.alternatives and config.cluster.launcher is LauncherName.local:
        yield "cluster.alternatives are kinds of nodes of a Slurm cluster; leave them out here"


def rule_cluster(config: Config, situation: Situation) -> Iterator[str]:
    """Ask the cluster, where the command has one."""
    if config.cluster.launcher is LauncherName.slurm and situation.cluster is not None:
        yield from situation.cluster.problems(by_itself(config) if situation.is_alone else config)
