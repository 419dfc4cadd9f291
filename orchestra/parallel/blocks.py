"""What is done to the blocks of a model from outside: products of fp8, recomputation, compilation. `apply`
says in which order.

Products of fp8 take the place of the blocks' own, cut over ranks or not, and on request of those with the
output matrix. What is sensitive stays in 16 bits or more: embedding, loss, norms, the attention between its
products, the output matrix if nobody asks for it, and on request whole blocks at both ends of the model.

Recomputation computes activations of whole blocks again in the backward pass, instead of keeping them. A
block's forward is wrapped, not its module: hooks of the module (which gather parameters, say) stand around
what is recomputed and are not run again with it. Random numbers are drawn again as they were. A second
forward pass ends as soon as it has what the backward pass needs: the last product of a block and the sum
after it are never repeated. The selective kind keeps the results of matrix products, of sums over ranks and
of attention's kernels (`sizes.activations.keeps_attention`), by torch's own contexts, and computes the rest
again: norms, rotation and the feed-forward's non-linearity. It sees the operators inside of the hand-written
functions too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from conf.schema import Config, Offload, PrecisionName, Recompute, Scaling
from orchestra.errors import ConfigError, TrainingError
from orchestra.model.latent_attention import LatentAttention
from orchestra.model.layers import Attention, GeluMLP, Linear, SwiGLU
from orchestra.model.logits import CompiledPasses
from orchestra.model.mixture.balance import uncounted
from orchestra.model.mixture.experts import EXPERTS, Experts
from orchestra.model.mixture.mixture import Mixture
from orchestra.model.transformer import Transformer
from orchestra.parallel.found_once import LearnedInPass
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.tensor.split import ColumnsProduct, RowsProducts
from orchestra.parallel.tensor.tensor_collectives import SUM_IN_PLACE, SUM_SCATTERED
from orchestra.precision.fp8 import LEAST_CAPABILITY, Fp8Products, scaling_of
from orchestra.precision.fp8_experts import (
    GROUPED_FP8_PRODUCTS,
    Fp8GroupedProducts,
    has_grouped_kernel,
)
from orchestra.precision.fp8_output import Fp8OutputProducts
from orchestra.precision.rounded_weights import RoundedWeights
from orchestra.precision.scale_history import ScaleHistory
from orchestra.sizes.activations import keeps_attention, kinds_of_layers
from orchestra.sizes.pipeline_schedule import splits_backward

# Most graphs of one function; what comes after them runs eager without an error (torch's own limit is 8).
# Blocks have one forward function: two graphs for each kind of block that is evaluated too, and one
# more of a mixture whose micro-batches are replayed; dense or mixture, in fp8 or in bf16, recomputed or not.
_MOST_GRAPHS = 64
# What products of gradients are made of later must not be overwritten by what is compiled.
_KEEPS_ITS_BUFFERS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
_aten = torch.ops.aten
_PRODUCTS = frozenset(
    operator
    for operator in (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.linear.default,
        _aten._scaled_mm.default,
        _aten._grouped_mm.default,
        _aten._scaled_grouped_mm.default,
        EXPERTS,
        GROUPED_FP8_PRODUCTS,
    )
)
# With what its backward pass needs of it.
_ATTENTIONS = frozenset(
    (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    )
)
# Of the one over lengths that vary, which torch has when that module is imported.
_VARYING = "torch_attn"
_traced = torch.ops._c10d_functional
_SUMS = frozenset((SUM_IN_PLACE, SUM_SCATTERED))
_TRACED_SUMS = frozenset((_traced.all_reduce.default, _traced.reduce_scatter_tensor.default))
# Whether torch tells a policy what an operator made; 2.13 does, older ones may not.
TELLS_OUTPUTS = "op_output" in inspect.signature(SelectiveCheckpointContext.__init__).parameters
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute_blocks(model: Transformer, config: Config, mesh: Mesh) -> None:
    """Wrap the blocks that the configuration wants recomputed; before they are compiled. *Any rank*.

    Raises ConfigError where the budget is too small for any choice.
    """
    kinds = kinds_of_layers(config, mesh.layout.dp, is_gpu=mesh.is_gpu)
    # What is exchanged between ranks divides a mixture's graph: what is repeated of it then runs eager.
    is_alone = mesh.layout.ep == mesh.layout.cp == 1
    is_kept = keeps_attention(config.model, mesh.layout.cp, is_gpu=mesh.is_gpu)
    for number, layer in model.numbered_layers():
        if kinds[number] is not Recompute.none:
            is_one_graph = config.train.compile is True and (is_alone or not _is_mixture(layer))
            layer.forward = recomputed(
                layer, kinds[number], is_one_graph=is_one_graph, is_attention_kept=is_kept
            )


def direct_weights(model: Transformer, config: Config, mesh: Mesh) -> dict[str, int]:
    """Return the matrices whose gradients the model's functions give by themselves, with how often it uses
    each.

    Not the last one of a block that is recomputed and not compiled: there autograd's own product keeps its
    input before it is taken, so that a second forward pass ends before it. And none of blocks that are a
    plug-in, which may use a weight as often and by whatever functions they like.
    """
    kinds = kinds_of_layers(config, mesh.layout.dp, is_gpu=mesh.is_gpu)
    repeated = {
        f"layers.{number}.mlp.{last}.weight"
        for number, kind in enumerate(kinds)
        for last in ("down_proj", "shared_experts.down_proj")
        if kind is not Recompute.none and config.train.compile is not True
    }
    is_plugged = config.model.block is not None
    # Where the embedding is another rank's, its module only holds the matrix for the output.
    idle = None if model.has_embedding else model.embed_tokens
    modules = [module for module in model.modules() if module is not idle]
    users = [parameter for module in modules for parameter in module._parameters.values()]
    stacked = {id(it) for module in modules if isinstance(module, Experts) for it in module.parameters()}
    return {
        name: sum(user is weight for user in users)
        for name, weight in model.named_parameters()
        if (weight.dim() == 2 or id(weight) in stacked)
        and name not in repeated
        and not (is_plugged and name.startswith("layers."))
    }


def recomputed(
    block: nn.Module, kind: Recompute, *, is_one_graph: bool = False, is_attention_kept: bool = False
) -> Callable[..., Any]:
    """Return the block's forward with its activations recomputed, fully or but for its products and, if that
    is wanted, its attention.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    # A compiler never repeats what changes a counter.
    is_counted = not is_one_graph and _is_mixture(block)
    if kind is Recompute.selective:
        _refuse_unknown_sums(block)
        options["context_fn"] = _contexts_keeping(
            _num_products(block), is_attention_kept=is_attention_kept, is_counted=is_counted
        )
    elif is_counted:
        options["context_fn"] = _counted_once
    elif is_one_graph:
        # Left to itself torch 2.11 keeps what is made in functions whose backward pass is written by hand.
        options["context_fn"] = _contexts_keeping(0, is_attention_kept=False, is_counted=False)
    return functools.partial(checkpoint, block.forward, **options)


def _is_mixture(block: nn.Module) -> bool:
    return any(isinstance(module, Mixture) for module in block.modules())


def _contexts_keeping(
    num_products: int, *, is_attention_kept: bool, is_counted: bool
) -> Callable[[], Contexts]:
    """Return `_contexts` for so many products, with what compiled blocks on the disk are found again by."""
    contexts = functools.partial(_contexts, num_products, is_attention_kept, is_counted=is_counted)
    contexts.cache_hash = f"{_sources()} {num_products} {is_attention_kept}"  # type: ignore[attr-defined]
    return contexts


def _num_products(block: nn.Module) -> int:
    """Return how many products a block takes, and one more where experts take the last one: what they made
    is needed, for the gradients of the weights by which it is summed.
    """
    number = sum(isinstance(module, nn.Linear | ColumnsProduct) for module in block.modules())
    for module in block.modules():
        if isinstance(module, Mixture):
            router = 1
            number += router + module.experts.num_products + 1
    return number


def _counted_once() -> Contexts:
    """Return the contexts of a pass that counts tokens and asks other ranks for theirs, and of a repetition
    that does neither.
    """
    learned = LearnedInPass()
    return learned.kept(), _all_of(uncounted(), learned.taken())


def _contexts(num_products: int, is_attention_kept: bool, *, is_counted: bool) -> Contexts:
    """Return the contexts of one pass, which keeps all products but the last one, the sums over ranks of
    those that it keeps, and attention where that is wanted; of no products none.

    The last product is the block's output, which the next block keeps as its input. A sum is taken in the
    memory of its product: whoever repeated one of the two alone would sum twice, or sum nothing.
    """
    # An older torch asks once more in the repetition, and wants the same answers.
    left, was_kept = dict.fromkeys((False, True), num_products - 1), {False: False, True: False}
    memory: set[int] = set()

    def is_kept(context: Any, operator: Any, *arguments: Any) -> bool:
        again = bool(context.is_recompute)
        if operator in _PRODUCTS:
            was_kept[again] = left[again] > 0
            left[again] -= 1
            if was_kept[again] and TELLS_OUTPUTS:
                made = context.op_output
                memory.update(map(_memory_of, made if isinstance(made, tuple) else (made,)))
            return was_kept[again]
        if operator in _ATTENTIONS or operator.namespace == _VARYING:
            return is_attention_kept
        if operator in _TRACED_SUMS or (operator in _SUMS and not TELLS_OUTPUTS):
            # What is traced has no memory yet: a sum is of the product before it.
            return was_kept[again]
        return operator in _SUMS and _memory_of(arguments[0]) in memory

    def policy(*arguments: Any, **_: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(*arguments) else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        policy, allow_cache_entry_mutation=True
    )
    if not is_counted:
        return first, second
    of_first, of_second = _counted_once()
    return _all_of(first, of_first), _all_of(second, of_second)


def _refuse_unknown_sums(block: nn.Module) -> None:
    """Raise ConfigError for a mixture that is cut by tensor parallelism where torch does not tell a product's
    output: its own sum over ranks does not follow its product at once.
    """
    is_cut = any(isinstance(module, ColumnsProduct) for module in block.modules())
    if not TELLS_OUTPUTS and is_cut and _is_mixture(block):
        raise ConfigError(
            f"train.recompute=selective of mixtures with parallelism.tp needs a newer torch than "
            f"{torch.__version__} (2.13 is known to do); use train.recompute=full or none"
        )


def _memory_of(tensor: torch.Tensor) -> int:
    """Return what views of the same memory have in common, which may have been released."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _all_of(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _find_on_disk() -> None:
    """Let a further start find on the disk what it compiles, also where a function's backward pass is written
    by hand. It is part of what a graph is found by, as it was traced; what the compiler asks operators for is
    not, and so the sources are.
    """
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    tag = torch.compiler.config.cache_key_tag
    if not tag.endswith(_sources()):
        torch.compiler.config.cache_key_tag = f"{tag} {_sources()}".strip()


@functools.cache
def _sources() -> str:
    """Return a digest of the code that compilers see."""
    package = Path(__file__).parents[1]
    files = [file for name in ("model", "parallel", "precision") for file in (package / name).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _count_random_by_dropout() -> None:
    """Let the compiler take attention that drops nothing out for what it is: not random. torch 2.14 does so
    by itself. Older ones keep the generator's state around it where it is computed again, which takes the
    host a fifth of a block's passes or more, and 2.11 then compiles it at each start.
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    if hasattr(partitioners, "is_rng_op"):
        return

    def has_recomputable_rng_ops(module: fx.GraphModule) -> bool:
        return any(partitioners.must_recompute(node) and _is_random(node) for node in module.graph.nodes)

    partitioners.has_recomputable_rng_ops = has_recomputable_rng_ops


def _is_random(node: fx.Node) -> bool:
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0.0)
    return True


def compile_blocks(model: Transformer, config: Config) -> None:
    """Compile each block's forward in place, and the loss' passes over the logits, where train.compile is
    true; equal blocks share one compilation.

    `auto` compiles nothing: where ranks train, `build.with_compilation` has put true or false in its place.
    The forward and not the module: hooks of the module then run outside of what is compiled.
    """
    if config.train.compile is True:
        _find_on_disk()
        _count_random_by_dropout()
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
        model.logits_passes = CompiledPasses()
        is_split = config.parallelism.pp > 1 and splits_backward(config.parallelism.schedule)
        for layer in model.layers:
            # Shapes are fixed for a run; what is compiled for any shape is slower.
            options = _KEEPS_ITS_BUFFERS if is_split else None
            layer.forward = torch.compile(layer.forward, dynamic=False, options=options)


def set_products(model: Transformer, config: Config, device: torch.device) -> ScaleHistory | None:
    """Let the blocks, and the loss, compute in fp8 on a device where that is configured. *Any rank*, after
    tensors are cut. Return, for delayed scaling, the history that `keep_history` gives to the weights.
    """
    precision = config.precision
    if precision.name is not PrecisionName.fp8:
        return None
    is_compiled = config.train.compile is True and device.type == "cuda"
    if precision.fp8_output:
        model.output_products = functools.partial(
            Fp8OutputProducts, precision.fp8_scaling, is_compiled=is_compiled
        )
    history = ScaleHistory() if precision.fp8_delayed_scaling else None
    products = Fp8Products(precision.fp8_scaling, history)
    of_experts = Fp8GroupedProducts(has_grouped_kernel(device), is_compiled)
    for _, block in _blocks_in_fp8(model, config):
        for module in list(block.modules()):
            if isinstance(module, Experts):
                module.products = of_experts
            else:
                _set(module, products)
    return history


def keep_history(history: ScaleHistory, model: Transformer, config: Config) -> None:
    """Give the weights of products in fp8, once they exist, what they are scaled by. *Any rank*."""
    products = []
    for number, block in _blocks_in_fp8(model, config):
        for name, module in block.named_modules():
            products += [
                {f"layers.{number}.{name}.{each}": getattr(module, each).weight for each in sharing}
                for sharing in _sharing_inputs(module)
            ]
    history.attach(products)


def _sharing_inputs(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the linear layers of a module, those of one input together."""
    if isinstance(module, LatentAttention):
        low = "kv_a_proj_with_mqa"
        queries = [(low,), ("q_proj",)] if module.query_width is None else [("q_a_proj", low), ("q_b_proj",)]
        return [*queries, ("kv_b_proj",), ("o_proj",)]
    if isinstance(module, Attention):
        return [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    if isinstance(module, SwiGLU):
        return [("gate_proj", "up_proj"), ("down_proj",)]
    return [("up_proj",), ("down_proj",)] if isinstance(module, GeluMLP) else []


def _weights_in_fp8(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights by which a module itself takes products in fp8; a router has none."""
    if isinstance(module, Experts):
        return [module.gate_proj, module.up_proj, module.down_proj]
    return [getattr(module, name).weight for names in _sharing_inputs(module) for name in names]


def _blocks_in_fp8(model: Transformer, config: Config) -> list[tuple[int, nn.Module]]:
    """Return the blocks that compute in fp8, of those that are here, with their numbers in the model."""
    num_kept = config.precision.fp8_bf16_blocks
    in_fp8 = range(num_kept, config.model.num_hidden_layers - num_kept)
    return [(number, block) for number, block in model.numbered_layers() if number in in_fp8]


def keep_rounded(model: Transformer, config: Config) -> RoundedWeights | None:
    """Keep the weights of products in fp8 as they are rounded, once they exist; None in other precisions.
    *Any rank*, where parameters are whole, and after the hooks that wait for them.
    """
    if config.precision.name is not PrecisionName.fp8:
        return None
    is_compiled = config.train.compile is True and next(model.parameters()).is_cuda
    return RoundedWeights(_matrices(model, config), config.precision.fp8_scaling, is_compiled=is_compiled)


def gathered_in_fp8(model: Transformer, config: Config) -> list[torch.Tensor]:
    """Return the matrices, once they exist, that ZeRO-3 gathers as the numbers their products take.

    Where rows have scales none, as of experts: a rank's range may end inside of one. None where parameters
    come from host memory, or while others are still updated: their largest numbers are then not known. And no
    tied table, which is looked up in 16 bits.
    """
    precision, is_there = config.precision, config.parallelism.offload is Offload.none
    if precision.name is not PrecisionName.fp8 or precision.fp8_scaling is Scaling.row or not is_there:
        return []
    weights = [
        weight
        for of_block in _matrices(model, config).values()
        for weight in of_block
        if scaling_of(weight, precision.fp8_scaling) is not Scaling.row
    ]
    tied = model.embed_tokens.weight if config.model.tie_word_embeddings and model.has_output else None
    return [weight for weight in weights if weight is not tied]


def _matrices(model: Transformer, config: Config) -> dict[nn.Module, list[torch.Tensor]]:
    """Return the weights of products in fp8, by the modules before which ZeRO waits for them."""
    matrices: dict[nn.Module, list[torch.Tensor]] = {
        block: [weight for module in block.modules() for weight in _weights_in_fp8(module)]
        for _, block in _blocks_in_fp8(model, config)
    }
    if config.precision.fp8_output and model.has_output:
        matrices[model.norm] = [model.lm_head.weight]
    return matrices


def _set(module: nn.Module, products: Fp8Products) -> None:
    if not isinstance(module, Attention | LatentAttention | SwiGLU | GeluMLP):
        return
    if isinstance(module, LatentAttention):
        module.latents = module.of_latents = products
    entering = module.products
    module.products = (
        RowsProducts(entering.group, products) if isinstance(entering, RowsProducts) else products
    )
    leaving = module.o_proj if isinstance(module, Attention | LatentAttention) else module.down_proj
    if isinstance(leaving, ColumnsProduct):
        leaving.product = products.linear
    elif isinstance(module, Attention | LatentAttention):
        module.o_proj = _Fp8Linear(leaving, products)
    else:
        module.down_proj = _Fp8Linear(leaving, products)


class _Fp8Linear(Linear):
    """Takes the place of a linear layer, with its parameters.

    A module of its own and no function put in the layer's place: torch.compile would ask of a function which
    one it is, and compile every block by itself.
    """

    def __init__(self, linear: nn.Linear, products: Fp8Products) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.linear(x, self.weight, self.bias)


def refuse_missing_hardware(config: Config, device: torch.device) -> None:
    """Raise TrainingError where this rank's device has no fast products in the configured precision."""
    if config.precision.name is not PrecisionName.fp8:
        return
    needed = ".".join(map(str, LEAST_CAPABILITY))
    if device.type != "cuda":
        found = "this rank trains on the CPU"
    elif torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found = f"{torch.cuda.get_device_name(device)} has {capability}"
    else:
        return
    raise TrainingError(
        f"precision=fp8 needs a GPU of compute capability {needed} or more (Ada, Hopper, Blackwell), and "
        f"{found}; use precision=bf16"
    )
