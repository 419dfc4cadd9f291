"""Which kernel computes attention on a device, and whether a system's cuDNN keeps torch's own from doing it.

Rank 0 asks once where training begins (`orchestra.train.trainer`). Functions that ask torch are apart from
the one that judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from conf.schema import ModelConfig
from orchestra.model.documents import has_varying_lengths
from orchestra.sizes.flops import head_dim

UNKNOWN = "unknown"
# From this version on torch lets cuDNN compute attention on Hopper and Blackwell (compute capability 9 and
# 10); with an older one it takes flash attention 2 and says nothing. How much slower that is was measured in
# huggingface/transformers, issue 48163, at lengths that are trained with.
LEAST_CUDNN = 91501
_CUDNN_GENERATIONS = (9, 10)
_SLOWER = "1.7 to 2.3 times"


@dataclass(frozen=True)
class Cudnn:
    """The cuDNN that a process has loaded: its version as torch counts (91501 is 9.15.1) and its file; None
    where there is none, or nobody knows.
    """

    version: int | None
    library: str | None

    @property
    def words(self) -> str:
        """The version as it is written, 9.15.1."""
        version = self.version or 0
        # Before version 9 a thousand stood for a major version.
        major, rest = divmod(version, 10000 if version >= 90000 else 1000)
        return ".".join(map(str, (major, *divmod(rest, 100))))


@dataclass(frozen=True)
class SlowAttention:
    """Why attention is slower than on this GPU it can be, and what to do."""

    cause: str
    advice: str


def slow_attention(
    cudnn: Cudnn, capability: tuple[int, int], library_path: str | None
) -> SlowAttention | None:
    """Return what is wrong on a GPU of a compute capability with the cuDNN that is loaded; None where nothing
    is. `library_path` is the value of LD_LIBRARY_PATH.
    """
    if capability[0] not in _CUDNN_GENERATIONS or cudnn.version is None or cudnn.version >= LEAST_CUDNN:
        return None
    place = f" from {cudnn.library}" if cudnn.library else ""
    needed = Cudnn(LEAST_CUDNN, None).words
    cause = (
        f"cuDNN {cudnn.words} is loaded{place}, and torch computes attention in cuDNN from {needed} on: "
        f"without it attention takes {_SLOWER} as long"
    )
    if not library_path:
        return SlowAttention(cause, f"install nvidia-cudnn {needed} or later beside torch")
    return SlowAttention(
        cause,
        f"LD_LIBRARY_PATH={library_path} puts a system's libraries before those that torch brings: unset it "
        "where training starts, or leave out the module that sets it (cuda, cudnn; see cluster.setup)",
    )


def loaded_cudnn() -> Cudnn:
    """Return the cuDNN of this process."""
    ask: Callable[[], int | None] = torch.backends.cudnn.version
    try:
        version = ask()
    except RuntimeError:
        # torch refuses one older than it was built with, but only the first time; attention uses it anyway.
        version = ask()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    return Cudnn(version, cudnn_file(maps))


def cudnn_file(maps: str) -> str | None:
    """Return the first file of cuDNN among those that a process has mapped, from its /proc/PID/maps."""
    # Address, permissions, offset, device, inode, and the rest of the line is the file.
    files = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((file for file in files if Path(file).name.startswith("libcudnn")), None)


def attention_backend(
    model: ModelConfig, sequence: int, dtype: torch.dtype, device: torch.device, *, with_documents: bool
) -> str:
    """Return which kernel torch takes: `cudnn`, `flash`, `efficient` or `math`; `flash varlen` where flash
    attention computes documents one by one; `unknown` where this torch does not say.
    """
    width = head_dim(model)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if with_documents and has_varying_lengths(capability, dtype, width):
        return "flash varlen"
    num_sharing = model.num_attention_heads // model.num_key_value_heads
    query = torch.empty((1, num_sharing, sequence, width), dtype=dtype, device=device, requires_grad=True)
    key = torch.empty((1, 1, sequence, width), dtype=dtype, device=device, requires_grad=True)
    mask = torch.zeros((1, 1, sequence, sequence), dtype=dtype, device=device) if with_documents else None
    # What scaled_dot_product_attention itself asks; it is torch's own and may go.
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return UNKNOWN
    try:
        chosen = choose(query, key, key, mask, 0.0, mask is None, enable_gqa=num_sharing > 1)
    except (TypeError, RuntimeError):
        return UNKNOWN
    name = SDPBackend(chosen).name
    return name.removesuffix("_ATTENTION").lower() if name in SDPBackend.__members__ else UNKNOWN
