r"""The weight-gradient store: it defers the gradients of parameters from I, a stage's input gradient, to W.

    F   a layer uses an alias of the parameter      x ---- operator ---- y      the operator runs on the parameter's
                                                            |    \              memory, without an edge to it
                                                          alias   hook
    I   autograd goes from y to x; the hook stores (x, the gradient of y)
    W   the parameter's gradient is computed from what is stored, and added to the alias's gradient

The alias belongs to a subclass of Tensor, so PyTorch calls its `__torch_function__` for every operator. An operator of
`operators` or `detached_graph` runs without an edge from its output to the parameter, and a hook on the output stores
what the parameter's gradient needs. Every other operator runs as always, and autograd computes its gradient in I.

The result is exact to the last bit only in autograd's order of summation: for one micro-batch over the uses of the
parameter, then over micro-batches. So all uses of a parameter are deferred, or none. The first forward of a pipe defers
nothing and shows how each parameter is used. If a later forward uses a deferred parameter in another way, the part that
autograd computes in I is stored too and added in W. That gradient is right, but with three or more uses it is summed in
another order. The parameter is not deferred from the next mini-batch on.

PyTorch calls no `__torch_function__` when a `torch.autograd.Function` is applied to a parameter. If deferred operators
use that parameter too, its gradient is right, but summed in another order.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd.weight_split.detached_graph import OPERATORS, tensors_among, with_detached_graph
from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, Parts, Queue
from pipework.autograd.weight_split.operators import DECOMPOSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_without_subclass = torch_private.without_torch_function
_is_grad_enabled, _in_transform = torch.is_grad_enabled, torch_private.in_transform
_is_compiling = torch.compiler.is_dynamo_compiling
_HOOKING: Final = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class WeightGradientAlias(DeferrableAlias):
    """An alias leaf whose `__torch_function__` sees every operator that uses it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A layer that copies itself or its parameters gets plain tensors."""
        return copy.deepcopy(self.plain.detach().requires_grad_(), memo)

    @staticmethod
    def of(plain: Tensor, weight_store: WeightGradientStore, deferred: bool | None) -> WeightGradientAlias:
        """An alias of a parameter; `plain` is the detached parameter, and both share its version counter."""
        alias = cast("WeightGradientAlias", torch_private.make_subclass(WeightGradientAlias, plain, True))
        is_factor = plain.dim() == 2 and plain.stride() == (plain.shape[1], 1)
        return alias.filled(plain, weight_store, deferred, is_factor=is_factor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch for every operator with such an alias among its arguments."""
        kwargs = kwargs or {}
        if _is_compiling():  # compiled code calls no __torch_function__
            with _without_subclass():
                return func(*args, **kwargs)
        operator = OPERATORS.get(func)
        # Transforms of torch.func handle each operator themselves.
        if operator is not None and _is_grad_enabled() and not _in_transform():
            with _without_subclass():
                operation = operator(*args, **kwargs) or with_detached_graph(func, args, kwargs)
                if operation is not None:
                    return operation.parameters[0].weight_store.run(operation)
        elif func in DECOMPOSED:
            return DECOMPOSED[func](*args, **kwargs)
        with _without_subclass():
            result = func(*args, **kwargs)
            if func in _HOOKING:  # autograd must call the hook with the gradient
                args[0].weight_store.note_other_use(args[0])
            else:
                _note_other_use(args[0] if func is Tensor.__setitem__ else result, args, kwargs)
        return result


def _note_other_use(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the parameters from which something differentiable has been made."""
    made = result if isinstance(result, tuple | list) else (result,)
    # The tensors of a transform do not show whether they require a gradient.
    if torch_private.in_transform() or any(
        isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf for tensor in made
    ):
        for alias in tensors_among((*args, *kwargs.values())):
            if isinstance(alias, DeferrableAlias):
                alias.weight_store.note_other_use(alias)


class WeightGradientStore:
    """What one stage defers in one mini-batch.

    Args:
        known: by the id of a parameter, whether its gradient is deferred; the store adds what it learns.
        new_queue: makes a list for what a micro-batch defers.

    Attributes:
        accumulates: whether the backward of the latest I accumulates all gradients, as `loss.backward()` does, and not
            some only, as `torch.autograd.grad`.
    """

    def __init__(self, known: dict[int, bool], new_queue: Callable[[], Queue] = list) -> None:
        self._new_queue = new_queue
        self.accumulates = False
        self._known = known
        self._queues: dict[int, Queue] = {}
        self._mixed: dict[int, dict[int, DeferrableAlias]] = {}
        self._mixed_lastingly: set[int] = set()
        self._used: dict[int, DeferrableAlias] = {}
        self._otherwise: set[int] = set()
        # For each operator that ran whole: the parameters of which all must be deferred if any is, and all parameters.
        self._together: list[tuple[tuple[DeferrableAlias, ...], tuple[DeferrableAlias, ...]]] = []
        # For each micro-batch, the parameters of which nothing was known in F: a layer that recomputes itself in I must
        # treat them as it did in F.
        self._unknown: dict[int, frozenset[int]] = {}
        self._enter(-1, [], frozenset())

    def _enter(self, micro_batch: int, queue: Queue, unknown: frozenset[int]) -> None:
        self._micro_batch, self._queue, self._unknown_here = micro_batch, queue, unknown

    def known(self, parameter: Tensor) -> bool | None:
        """Whether a parameter's gradient is deferred; None: no earlier mini-batch has shown it."""
        return self._known.get(id(parameter))

    def begin(self, micro_batch: int) -> None:
        """A forward (or recomputation) of a micro-batch begins: its uses of parameters belong to it."""
        self._unknown.pop(micro_batch, None)
        queue = self._queues[micro_batch] = self._new_queue()
        self._enter(micro_batch, queue, frozenset())

    def run(self, operation: Operation) -> Tensor:
        """Runs an operator, and defers the gradients of its parameters if all their uses allow it.

        Called where `__torch_function__` is off.
        """
        unknown = self._unknown_here
        for alias in operation.parameters:
            if not alias.requires_grad:  # a layer has frozen it for the moment
                return self._run_whole(operation)
            if not alias.deferred or (unknown and id(alias) in unknown):
                if not operation.leave_out(alias):
                    return self._run_whole(operation)
                self._note_whole(alias, lasting=True)
        output = operation.run()
        operation.wait_in(self._queue)
        node = output.grad_fn
        if node is not None:
            node.register_prehook(operation)
        else:
            output = _Anchor.apply(output, operation.parameters[0], operation)  # type: ignore[no-untyped-call]
        return operation.shaped(output)

    def _run_whole(self, operation: Operation) -> Tensor:
        parameters = tuple([alias for alias in operation.parameters if alias.requires_grad])
        learning = any(alias.deferred is None for alias in parameters)
        for alias in parameters:
            # A deferred parameter beside one of which nothing is known is not deferred in this micro-batch only.
            self._note_whole(alias, lasting=not learning)
        output = operation.run_whole()
        if learning:
            self._together.append((parameters[: operation.deciding], parameters))
            if output.grad_fn is not None:
                _hook_gradient(output, _Differentiable(self, parameters))
        return output

    def _note_whole(self, alias: DeferrableAlias, *, lasting: bool) -> None:
        if alias.deferred is None:
            self._used[id(alias)] = alias
        elif alias.deferred:
            self._note_mixed(alias, lasting=lasting)

    def note_other_use(self, alias: DeferrableAlias) -> None:
        """Notes that an operator has used a parameter in a way that defers nothing."""
        if alias.deferred is None:
            self._otherwise.add(id(alias))
        self._note_whole(alias, lasting=True)

    def _note_mixed(self, alias: DeferrableAlias, *, lasting: bool) -> None:
        if id(alias) not in self._unknown_here:
            self._mixed.setdefault(self._micro_batch, {})[id(alias)] = alias
            if lasting:
                self._mixed_lastingly.add(id(alias))

    def end(self) -> None:
        """The forward is over: decides which of the parameters that it used are deferred."""
        if self._used:
            self._spread()
            for alias in self._used.values():
                alias.deferred = id(alias) not in self._otherwise
            self._unknown[self._micro_batch] = self._unknown.get(self._micro_batch, frozenset()) | frozenset(self._used)
            self._used.clear()
            self._together.clear()

    def _spread(self) -> None:
        """If the weight of an operator is not deferred, no parameter of the operator is, in none of its uses."""
        known = -1
        while known < len(self._otherwise):
            known = len(self._otherwise)
            for deciding, parameters in self._together:
                if any(alias.deferred is False or id(alias) in self._otherwise for alias in deciding):
                    self._otherwise.update(map(id, parameters))

    def learn(self, parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
        """After the mini-batch: notes which parameters are deferred in the next."""
        for parameter, alias in zip(parameters, aliases, strict=True):
            if isinstance(alias, WeightGradientAlias) and alias.deferred is not None:
                self._known[id(parameter)] = alias.deferred and id(alias) not in self._mixed_lastingly
        for gone in self._known.keys() - set(map(id, parameters)):  # another parameter may get this id
            del self._known[gone]

    def nothing_to_differentiate(self, micro_batch: int) -> None:
        """I, of outputs that need no gradient: drops what a layer has differentiated for itself in F."""
        self._queues[micro_batch].clear()

    def differentiate(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """I: runs autograd; what it computes of a deferred gradient is stored for W."""
        queue = self._queues[micro_batch]
        queue.clear()
        self.accumulates = torch_private.accumulates_all()
        self._enter(micro_batch, queue, self._unknown.get(micro_batch, frozenset()))
        if micro_batch not in self._mixed:  # the usual case
            backward()
            self.end()  # for layers that were computed in I only
            return
        mixed = list(self._mixed[micro_batch].values())
        before = [alias.grad for alias in mixed]
        for alias in mixed:
            alias.grad = None
        backward()
        self.end()
        for alias, gradient in zip(mixed, before, strict=True):
            if alias.grad is not None:
                queue.append((_Computed(alias), alias.grad, alias.grad))
            alias.grad = gradient

    def add_weight_gradients(self, micro_batch: int, *, again: bool) -> None:
        """W: computes the deferred gradients and adds them to the aliases' gradients.

        Args:
            micro_batch: its number.
            again: whether its backward may run once more (`retain_graph`).
        """
        queue = self._queues[micro_batch] if again else self._queues.pop(micro_batch)
        if queue:
            with torch.no_grad(), _without_subclass():
                _add_gradients(queue)

    @property
    def micro_batches(self) -> list[int]:
        """Those of which something may be stored."""
        return list(self._queues)

    def kept(self, micro_batch: int) -> list[Tensor]:
        """The tensors that are stored for the W of a micro-batch."""
        return [tensor for _, *pair in self._queues.get(micro_batch, ()) for tensor in pair]

    def clear(self) -> None:
        """Drops everything, after a failure."""
        for queue in self._queues.values():  # an operation refers to its queue
            queue.clear()
        self._queues.clear()
        self._mixed.clear()
        self._used.clear()
        self._together.clear()
        self._enter(-1, [], frozenset())


def _hook_gradient(output: Tensor, hook: Callable[[tuple[Tensor | None, ...]], None]) -> None:
    """Calls `hook` with the gradients that the node of `output` gets, after all hooks of the tensor itself.

    `Tensor.register_hook` would be called before hooks that the user registers later, which may change the gradient.
    """
    output.grad_fn.register_prehook(hook)  # type: ignore[union-attr]


def _add_gradients(queue: Queue) -> None:
    """Adds to each alias's gradient the sum of its parts, in autograd's order. Empties the queue.

    Parts that autocast has in another dtype are added up in that dtype first.
    """
    uses: dict[int, int] = {}
    for waiting, _, _ in queue:
        for alias in waiting.parameters:
            uses[id(alias)] = uses.get(id(alias), 0) + 1
    sums: dict[int, tuple[DeferrableAlias, Tensor]] = {}
    in_other_types: dict[tuple[int, torch.dtype], tuple[DeferrableAlias, Tensor]] = {}
    queue.reverse()
    while queue:
        waiting, kept, gradient = queue.pop()  # frees the memory of each before the next
        waiting.refuse_overwritten(gradient)
        for pair in waiting.gradients(kept, gradient):
            alias, part = pair
            if part.dtype is not alias.type_of_values:
                _add(in_other_types, (id(alias), part.dtype), pair)
            elif uses[id(alias)] == 1:  # the usual case; the part is still in the processor's cache
                _add_to_buffer(alias, part)
            else:
                _add(sums, id(alias), pair)
    for alias, part in in_other_types.values():
        _add(sums, id(alias), (alias, part.to(alias.type_of_values)))
    for alias, part in sums.values():
        _add_to_buffer(alias, part)


def _add(sums: dict[Any, tuple[DeferrableAlias, Tensor]], key: Any, pair: tuple[DeferrableAlias, Tensor]) -> None:
    before = sums.get(key)
    sums[key] = pair if before is None else (pair[0], before[1] + pair[1])


def _add_to_buffer(alias: DeferrableAlias, part: Tensor) -> None:
    if alias.grad is None:
        # A tensor of its own, as autograd would make: the part may be the output's gradient, which others have, too.
        alias.grad = part.detach()
    else:
        alias.grad.add_(part)


class _Computed:
    """Stands in the queue for a part that autograd has computed already."""

    def __init__(self, alias: DeferrableAlias) -> None:
        self.parameters = (alias,)

    def refuse_overwritten(self, gradient: Tensor) -> None:
        """See `Operation`: nothing else has the part."""

    def gradients(self, kept: Tensor, gradient: Tensor) -> Parts:
        """The part itself."""
        return ((self.parameters[0], gradient),)


class _Differentiable:
    """A hook that notices a layer that differentiates a gradient, while it is not known how parameters are used."""

    def __init__(self, weight_store: WeightGradientStore, parameters: Sequence[DeferrableAlias]) -> None:
        self._weight_store, self._parameters = weight_store, parameters

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        if _is_grad_enabled():  # the graph of the gradient must lead to the parameters
            for alias in self._parameters:
                self._weight_store.note_other_use(alias)


class _Anchor(torch.autograd.Function):
    """A node for the hook, where only the parameter requires a gradient and the output would have no node."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, alias: Tensor, operation: Operation) -> Tensor:
        ctx.operation = operation
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.operation(gradients)
        return None, None, None
