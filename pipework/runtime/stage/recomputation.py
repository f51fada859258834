"""Recomputation: a checkpointed micro-batch runs twice, and must be the same both times.

Buffers that layers change while they run (batch norm's statistics): the first pass changes them. The second must read
the values that the first has read, and must not change them again. So buffers are cloned before the first pass. During
the second, the modules hold the clones, which are then dropped. Training flags are kept too, since the user may
evaluate between forward and backward. All small buffers are cloned, and large ones if they are known to change: a clone
of a constant mask for every micro-batch would cost the memory that checkpointing saves. The stage's first checkpointed
pass compares values to learn which buffers change, since batch norm's kernels do not increment a tensor's version.

    first pass   1 buffers are cloned -> 2 layers run on leaves of their own -> 3 inputs are kept, the graph is not
    second pass  4 nothing has changed -> 5 modules hold the clones -> 6 layers run -> 7 the graph is kept -> 8 compare

Outputs: random numbers of PyTorch's default generators and buffers are as they were in the first pass. Numbers from
elsewhere, and other state that a layer changes, are not: gradients would then be those of another output. So for one
micro-batch of each of the first mini-batches both outputs are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd import boundary
from pipework.runtime.stage.kept import Inputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.stage.actions import StageActions
    from pipework.runtime.stage.kept import AnyStructure
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Message


class _Phase(threading.local):
    """The phase of this thread, "checkpointing" or "recomputing"; every thread starts with the class attribute."""

    name = ""


# Layers call a plain function, which can find its worker only by the thread that it runs on.
_phase = _Phase()


def is_checkpointing() -> bool:
    """True in a layer's forward during the first pass of a checkpointed micro-batch.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.name == "checkpointing"


def is_recomputing() -> bool:
    """True in a layer's forward while a checkpointed micro-batch is computed for the second time, for its backward.

    Example:
        >>> is_recomputing()
        False
    """
    return _phase.name == "recomputing"


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Marks the first or the second pass of a checkpointed micro-batch on this thread."""
    _phase.name = name
    try:
        yield
    finally:
        _phase.name = ""


SMALL: Final = 64 * 1024
"""Bytes of a buffer; cloning so much costs no more than a few operators."""


class Slot(NamedTuple):
    """The place of a buffer in a module: a dictionary and a name."""

    buffers: dict[str, Tensor | None]
    name: str

    @property
    def identity(self) -> tuple[int, str]:
        """Tells slots apart."""
        return id(self.buffers), self.name

    @property
    def mark(self) -> tuple[int, int]:
        """Differs after most changes of the buffer."""
        tensor = self.buffers.get(self.name)
        return id(tensor), -1 if tensor is None else torch_private.version(tensor)


class Snapshot(NamedTuple):
    """The buffers that may change, and the training flags, as they were before a first pass."""

    clones: list[tuple[Slot, Tensor | None]]
    marks: list[tuple[Slot, tuple[int, int]]]  # of the others
    created: list[Slot]  # by the first pass: they were not there before
    training: list[tuple[nn.Module, bool]]

    @property
    def tensors(self) -> list[Tensor]:
        """The clones."""
        return [clone for _, clone in self.clones if clone is not None]

    @contextlib.contextmanager
    def standing_in(self, *, again: bool) -> Iterator[None]:
        """Inside, the modules hold copies of the buffers from before the first pass.

        Args:
            again: whether the snapshot is used once more.
        """
        present = [(slot, slot.buffers.get(slot.name)) for slot in [*(slot for slot, _ in self.clones), *self.created]]
        changed = [(module, training) for module, training in self.training if module.training != training]
        for slot, clone in self.clones:
            slot.buffers[slot.name] = clone.clone() if again and clone is not None else clone
        for slot in self.created:
            slot.buffers.pop(slot.name, None)
        for module, training in changed:
            module.training = training
        try:
            yield
        finally:
            for module, training in changed:
                module.training = not training
            for slot, tensor in present:
                slot.buffers[slot.name] = tensor


class MutableBuffers:
    """The buffers of one stage, and which of the large ones change.

    Args:
        modules: the stage's layers, as they are run.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._mutable: set[tuple[int, str]] = set()  # the large ones, by slot
        self._compared = False

    def snapshot(self) -> Snapshot:
        """Clones the buffers that may change; called before a first pass."""
        clones: list[tuple[Slot, Tensor | None]] = []
        marks = []
        for slot in self._slots():
            tensor = slot.buffers[slot.name]
            if tensor is None or not self._compared or tensor.nbytes <= SMALL or slot.identity in self._mutable:
                clones.append((slot, None if tensor is None else tensor.clone()))
            else:
                marks.append((slot, slot.mark))
        training = [(module, module.training) for layer in self._modules for module in layer.modules()]
        return Snapshot(clones, marks, [], training)

    def learn(self, before: Snapshot, *, compares: bool = True) -> Snapshot:
        """After a first pass: remembers which large buffers it has changed. Returns the snapshot for the second pass.

        Args:
            before: the first pass.
            compares: whether there are values yet.

        Raises:
            RuntimeError: a large buffer has changed that did not change in the first checkpointed pass.
        """
        for slot, mark in before.marks:
            if slot.mark != mark:
                raise RuntimeError(
                    f"the large buffer {slot.name!r} (more than {SMALL:,} bytes) did not change when its layer was "
                    "first checkpointed, and changes now: its values for the recomputation were not kept. Let it "
                    "change from the first mini-batch on, or use checkpoint='never'"
                )
        known = {slot.identity for slot, _ in (*before.clones, *before.marks)}
        created = [slot for slot in self._slots() if slot.identity not in known]
        kept = before.clones
        if compares and not self._compared:
            self._compared = True
            self._mutable = {slot.identity for slot, clone in before.clones if _has_changed(slot, clone)}
            kept = [
                (slot, clone)
                for slot, clone in before.clones
                if clone is None or clone.nbytes <= SMALL or slot.identity in self._mutable
            ]
        return Snapshot(kept, [], created, before.training)

    @torch.no_grad()
    def restore(self, before: Snapshot) -> None:
        """After forwards that count for nothing: buffers are as in a snapshot, the same objects if shapes are equal."""
        for slot, clone in before.clones:
            now = slot.buffers.get(slot.name)
            is_alike = now is not None and clone is not None and (now.shape, now.dtype) == (clone.shape, clone.dtype)
            slot.buffers[slot.name] = now.copy_(clone) if is_alike else clone  # type: ignore[union-attr, arg-type]

    def _slots(self) -> Iterator[Slot]:
        """The slots of all present buffers, each once."""
        for module in dict.fromkeys(module for layer in self._modules for module in layer.modules()):
            if not isinstance(module, torch.jit.ScriptModule):  # with buffers it is refused, see `refuse_untrainable`
                yield from [Slot(module._buffers, name) for name in module._buffers]


def _has_changed(slot: Slot, clone: Tensor | None) -> bool:
    """Whether a buffer has changed; True for one without data, since that is not known."""
    now = slot.buffers.get(slot.name)
    return clone is not None and (now is None or clone.is_meta or not torch.equal(clone, now))


MINI_BATCHES: Final = 4
"""So many are compared: a layer that is left out now and then is seldom seen in the first one."""


class RecomputeCheck:
    """Keeps the output of the first checkpointed micro-batch of one mini-batch on one stage, until it is recomputed.

    Args:
        looks: has one entry for each further mini-batch that is to be checked.
    """

    __slots__ = ("_kept", "_looks", "_micro_batch")

    def __init__(self, looks: Iterator[int]) -> None:
        self._looks: Iterator[int] | None = looks
        self._micro_batch = -1
        self._kept: tuple[Tensor, ...] = ()

    def keep(self, micro_batch: int, outputs: Sequence[Tensor]) -> None:
        """Copies the outputs of a first pass, if it is the one to be checked."""
        if self._looks is None:
            return
        wanted, self._looks = next(self._looks, None) is not None, None
        # A mode of the caller's around one of the two passes changes the output of that one alone.
        if wanted and not torch_private.modes() and all(type(each) is Tensor and _comparable(each) for each in outputs):
            self._micro_batch = micro_batch
            self._kept = tuple([output.detach().clone() for output in outputs])  # a later stage may write to them

    def compare(self, micro_batch: int, outputs: Sequence[Tensor], place: str) -> None:
        """Compares the outputs of a recomputation.

        Args:
            micro_batch: its number.
            outputs: of the recomputation.
            place: the stage, for the message.

        Raises:
            RuntimeError: the first pass has given others.
        """
        if micro_batch != self._micro_batch:
            return
        kept = self._kept
        self.clear()
        if torch_private.modes():
            return
        if len(kept) != len(outputs) or not all(map(_same, kept, outputs)):
            raise RuntimeError(
                f"{place} gave another output when it was recomputed for its backward, so gradients would be wrong: a "
                "layer (or loss_fn, in the last stage) draws random numbers that cannot be drawn again (Python's "
                "random, numpy, a torch.Generator of its own), or changes a state in its forward, such as a counter; "
                "or the input was overwritten through .data or numpy. Draw with torch.rand without generator=, change "
                "state only if not pipework.model.checkpoint.is_recomputing(), or use checkpoint='never'"
            )

    def clear(self) -> None:
        """Drops the copies."""
        self._micro_batch = -1
        self._kept = ()


class FirstPass(NamedTuple):
    """A first pass that runs.

    Attributes:
        given: what a recomputation needs.
        leaves: what the layers get in place of the given leaves.
        versions: of these, before.
        found: whether an earlier micro-batch has changed its input in place; None: this is the first one.
        target: what the loss compares the output with; None: there is no loss.
        of_target: the versions of the target, before.
    """

    given: Inputs
    leaves: tuple[Tensor, ...]
    versions: list[int]
    found: bool | None
    target: Message | None
    of_target: list[int]


class Recomputation:
    """The two passes of the checkpointed micro-batches of one stage, in one mini-batch.

    Args:
        stage: the stage.
        aliases: of its parameters.
        compares: whether values may be compared; while actions are captured there are none.
    """

    def __init__(self, stage: Stage, aliases: Aliases, *, compares: bool) -> None:
        self._versions = aliases.versions
        self._compares = compares
        self._check = RecomputeCheck(stage.recompute_looks if compares else iter(()))

    def begin(self, run: StageRun, leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> FirstPass:
        """Before the first pass: what it runs on, and what is kept for the second one.

        Autograd records a graph all the same: it shows which outputs require a gradient, and a module that reads grad
        mode does the same in both passes. The graph is freed with the outputs. Until then it takes as much memory as
        that of the recomputation.
        """
        in_place, loss = run.in_place, run.loss
        given = Inputs(leaves, structure, run.stage.buffers.snapshot(), _versions(leaves))  # 1
        found, own = in_place.found, in_place.inputs_of_first_pass(leaves)
        target = None if loss is None else loss.targets[micro_batch]
        return FirstPass(given, own, _versions(own), found, target, _versions(() if target is None else target[0]))

    def end(
        self, run: StageRun, first: FirstPass, outputs: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int
    ) -> None:
        """After the first pass: keeps the input, and not the graph."""
        in_place, loss, leaves = run.in_place, run.loss, first.given.leaves
        if loss is not None and first.target is not None:
            if first.of_target != _versions(first.target[0]):
                raise RuntimeError(
                    "the loss changed its target in place, and checkpointing needs the target again. Clone it in the "
                    "loss, or use checkpoint='never'"
                )
            loss.targets[micro_batch] = first.target
        buffers = run.stage.buffers.learn(first.given.buffers, compares=self._compares)
        is_differentiated = loss is not None or (run.ports is not None and run.ports.any_gradients)
        if is_differentiated or any(output.requires_grad for output in outputs):
            run.kept.put_inputs(micro_batch, first.given._replace(buffers=buffers))  # 3
            self._check.keep(micro_batch, outputs)
        else:  # no R: no gradient will reach this stage
            run.kept.put(micro_batch, leaves, outputs, structure)
        if in_place.see_first_pass(first.leaves, first.versions, outputs, found=first.found):
            in_place.refuse_overlap(itertools.combinations(leaves, 2))  # layers have got copies, which share nothing

    def second_pass(self, actions: StageActions, micro_batch: int) -> None:
        """R: computes the micro-batch again and keeps the graph."""
        run, again = actions.run, actions.again
        inputs = run.kept.take_inputs(micro_batch, again=again)
        if inputs is None:
            return  # this stage is in evaluation mode: nothing was checkpointed here
        leaves, structure, buffers, versions = inputs
        del inputs
        # A stage that changes its input in place has run on copies. The caller's micro-batches share a version counter.
        untouched = run.in_place.found or versions == _versions(leaves)
        if not untouched or self._versions != run.aliases.versions:  # 4
            raise RuntimeError(
                f"an input or a parameter of stage {run.stage.index} has been modified by an inplace operation since "
                "its forward, so it cannot be recomputed for its backward. Call backward() before optimizer.step() and "
                "before the batch's memory is used again, or use checkpoint='never' if autograd need not have them"
            )
        if run.in_place.found:
            leaves = tuple(map(boundary.private_copy, leaves))
        elif again:
            leaves = tuple(map(boundary.renewed, leaves))
        with in_phase("recomputing"), buffers.standing_in(again=again):  # 5
            outputs, structure = actions.run_forward(leaves, structure, micro_batch)  # 6
            run.kept.put(micro_batch, leaves, outputs, structure)  # 7
            self._check.compare(micro_batch, outputs, run.stage.place)  # 8

    def clear(self) -> None:
        """Drops every tensor."""
        self._check.clear()


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(torch_private.counted_version, tensors))


def _comparable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _same(first: Tensor, second: Tensor) -> bool:
    first, second = first.detach(), second.detach()
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if not first.is_floating_point():
        return False
    # Kernels of an accelerator may add in any order, and those of a CPU in another one for memory that lies elsewhere.
    # That is rounding, and no reason for an error.
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    if first.dtype is not torch.float64:
        first, second = first.float(), second.float()
    largest = first.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * largest.item(), equal_nan=True)
