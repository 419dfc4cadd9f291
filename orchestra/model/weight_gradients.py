"""Where the gradients of matrices go in training: straight into the memory that is kept for them.

The backward pass makes a weight's gradient by one more product. Autograd would take it in fresh memory and
then copy or add it to where it is kept: a pass over memory as large as the weights, in every micro-batch. The
functions of this package give it to the weight's `WeightGradient` instead, where it has one: the product
itself writes, or adds, into that memory, and autograd gets no gradient. A weight that has none is treated as
in any model.

Whoever keeps the gradients attaches them (`orchestra.parallel.zero.reducer`). What is compiled can't hold
objects, and so a weight carries a ticket: a tensor, whose place in memory says which object it stands for. It
holds that place as a number too, for compiled code that gives a copy of it.

Shape letters: T tokens, I inputs and O outputs of a product, V rows and E columns of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from orchestra.model.operators import changing

_BY_TICKET: WeakValueDictionary[int, WeightGradient] = WeakValueDictionary()
_ATTRIBUTE = "gradient_ticket"


class LaterGradients:
    """Gradients that are not taken when a backward pass gives them but afterwards, when somebody has time for
    their products: what they are made of is kept until then.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._kept: list[Callable[[], None]] = []

    def put(self, take: Callable[[], None]) -> None:
        """Keep one."""
        self._kept.append(take)

    def kept(self) -> list[Callable[[], None]]:
        """Return what was kept since the last call, to be called in this order."""
        kept, self._kept = self._kept, []
        return kept


class WeightGradient:
    """The gradient of one weight in the current micro-batch: a part for each use of the weight in the model.

    `begin` returns where a part goes, in the weight's shape, and whether it adds to what is there; `end` is
    called when the part is in. While `later` is open, it keeps the parts.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[Tensor, bool]],
        end: Callable[[], None],
        later: LaterGradients | None = None,
    ) -> None:
        self.begin, self.end = begin, end
        self._later = LaterGradients() if later is None else later
        # A real tensor, in a dry run too, whose mode fakes all others: fake ones have no place in memory.
        with _disable_current_modes():
            self.ticket = torch.zeros(1, dtype=torch.int64)
            self.ticket.fill_(self.ticket.data_ptr())
        _BY_TICKET[self.ticket.data_ptr()] = self

    @property
    def takes_now(self) -> bool:
        """Whether a part is taken when it is given, and not kept for later."""
        return not self._later.is_open

    def add_product(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Take gradᵀ · x, the gradient of a product's weight [O, I]."""
        if self._later.is_open:
            self._later.put(lambda: self._add_product(grad_TO, x_TI))
        else:
            self._add_product(grad_TO, x_TI)

    def _add_product(self, grad_TO: Tensor, x_TI: Tensor) -> None:
        memory, adds = self.begin()
        add_product_(memory, grad_TO.t(), x_TI, adds=adds)
        self.end()

    def add(self, gradient: Tensor) -> None:
        """Take a gradient that lies somewhere else, of the weight's first rows or of all; others get 0."""
        if self._later.is_open:
            self._later.put(lambda: self._add(gradient))
        else:
            self._add(gradient)

    def add_made(self, make: Callable[[], Tensor]) -> None:
        """Take what `make` returns, of the weight's shape: it is made when it is taken."""
        if self._later.is_open:
            self._later.put(lambda: self._add(make()))
        else:
            self._add(make())

    def _add(self, gradient: Tensor) -> None:
        memory, adds = self.begin()
        if len(gradient) < len(memory):
            if not adds:
                memory[len(gradient) :].zero_()
            memory = memory[: len(gradient)]
        if adds:
            memory.add_(gradient)
        else:
            memory.copy_(gradient)
        self.end()

    def add_rows(self, row_T: Tensor, grad_TE: Tensor) -> None:
        """Take the gradient of a table [V, E] whose rows `row_T` (int64) were looked up."""
        if self._later.is_open:
            self._later.put(lambda: self._add_rows(row_T, grad_TE))
        else:
            self._add_rows(row_T, grad_TE)

    def _add_rows(self, row_T: Tensor, grad_TE: Tensor) -> None:
        memory, adds = self.begin()
        if not adds:
            memory.zero_()
        add_row_sums_(memory, row_T, grad_TE, on_gpu=memory.is_cuda)
        self.end()


def add_product_(memory: Tensor, left: Tensor, right: Tensor, *, adds: bool) -> None:
    """Write left · right into `memory`, or add it to what is there: inside the product where torch can."""
    if memory.dtype == left.dtype:
        if adds:
            memory.addmm_(left, right)
        else:
            torch.mm(left, right, out=memory)
    elif left.is_cuda and memory.dtype is torch.float32:
        if adds:
            torch.ops.aten.addmm.dtype_out(memory, left, right, torch.float32, out=memory)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=memory)
    elif adds:
        memory.add_(left @ right)
    else:
        memory.copy_(left @ right)


def add_row_sums_(memory: Tensor, row_T: Tensor, grad_TE: Tensor, *, on_gpu: bool) -> None:
    """Add to each row the sum over its tokens, which is taken first and in fp32: a word that is frequent
    would lose small parts in 16 bits, and two micro-batches sum up like two ranks. The host never waits for
    the number of different rows, and nothing is summed in a changing order. `on_gpu`: as suits one.
    """
    sorted_T, order = torch.sort(row_T, stable=True)
    is_new = torch.ones_like(sorted_T)
    is_new[1:] = sorted_T[1:] != sorted_T[:-1]
    # The sums of the different rows stand one after the other; the places after them are nobody's.
    place_T = is_new.cumsum(0) - 1
    row_at = torch.zeros_like(row_T).scatter_(0, place_T, sorted_T)
    wide_TE = grad_TE[order].to(torch.promote_types(grad_TE.dtype, torch.float32))
    if on_gpu:
        _add_sums_of_sorted_(memory, row_at, place_T, wide_TE)
        return
    sums_TE = torch.zeros_like(wide_TE).index_add_(0, place_T, wide_TE)
    memory.index_add_(0, row_at, sums_TE.to(memory.dtype))


def _add_sums_of_sorted_(memory: Tensor, row_at: Tensor, place_T: Tensor, wide_TE: Tensor) -> None:
    """Add the sums over equal places, which are sorted, to the rows of those places.

    A GPU's index_add_ sums in a changing order, and its index_put_ one token after the other: the sums are
    taken by what makes embeddings' gradients, and added where every row is written once, or twice alike.
    """
    num_tokens = len(place_T)
    sums_TE = torch.ops.aten.embedding_dense_backward(wide_TE, place_T, num_tokens, -1, False)
    # Nobody's places repeat those of the rows, all of them about as often.
    place = torch.arange(num_tokens, device=place_T.device) % (place_T[-1:] + 1)
    rows = row_at[place]
    memory.index_put_((rows,), memory[rows] + sums_TE[place].to(memory.dtype))


def attach(weight: Tensor, gradient: WeightGradient) -> None:
    """Let a weight's gradient go there from now on; the caller keeps the object alive."""
    setattr(weight, _ATTRIBUTE, gradient.ticket)


def detach(weight: Tensor) -> None:
    """Leave a weight's gradient to autograd again."""
    if hasattr(weight, _ATTRIBUTE):
        delattr(weight, _ATTRIBUTE)


def ticket_of(weight: Tensor) -> Tensor | None:
    """Return what a backward pass gives the weight's gradient to by; None: autograd gets it."""
    ticket: Tensor | None = getattr(weight, _ATTRIBUTE, None)
    return ticket


def tickets_of(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the tickets of weights that all have one, or none of which has."""
    return [ticket for ticket in map(ticket_of, weights) if ticket is not None]


def weight_gradient(ticket: Tensor) -> WeightGradient:
    """Return the object that a ticket stands for."""
    return _BY_TICKET[ticket.data_ptr()]


def known_by(number: int) -> WeightGradient:
    """Return the object whose ticket holds this number: compiled code gives copies of tickets."""
    return _BY_TICKET[number]


@changing("give_product")
def _give_product(ticket: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    known_by(int(ticket)).add_product(grad_TO, x_TI)


@changing("give_gradient")
def _give_gradient(ticket: Tensor, gradient: Tensor) -> None:
    known_by(int(ticket)).add(gradient)


def give_product(ticket: Tensor | None, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Return the gradient gradᵀ · x of a weight for autograd, or None where the ticket's owner took it."""
    if ticket is None:
        return grad_TO.t() @ x_TI
    if torch.compiler.is_compiling():
        _give_product(ticket, grad_TO, x_TI)
    else:
        weight_gradient(ticket).add_product(grad_TO, x_TI)
    return None


def give_products(
    tickets: Sequence[Tensor | None], grads: Sequence[Tensor], x_TI: Tensor
) -> list[Tensor | None]:
    """Return for autograd, as `give_product` does, the gradients of several weights of one input.

    The last one's is made first: the memory that they go to is filled from the model's end.
    """
    pairs = list(zip(tickets, grads, strict=True))
    return [give_product(ticket, grad_TO, x_TI) for ticket, grad_TO in reversed(pairs)][::-1]


def give_gradient(ticket: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Return a weight's gradient for autograd, or None where the ticket's owner took it."""
    if ticket is None:
        return gradient
    if torch.compiler.is_compiling():
        _give_gradient(ticket, gradient)
    else:
        weight_gradient(ticket).add(gradient)
    return None
