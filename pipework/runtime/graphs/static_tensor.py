"""Static tensors: what comes from outside of a graph is copied into one, and what goes outside is copied from one.

A graph reads and writes the addresses that it was captured with. What travels between workers is ordinary memory of the
allocator, as in a step without graphs: its lifetime is the matter of whoever sends and receives it.

    another worker --message--> static tensor --> graph --> static tensor --message--> another worker
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.autograd import boundary
from pipework.values.tensor_form import TensorForm, elements_of, memory_of

if TYPE_CHECKING:
    from torch import Tensor

    from pipework.runtime.graphs.device_graphs import Graphs


class StaticTensor:
    """The memory of one tensor, at an address that stays.

    Args:
        tensor: that lies there, whose memory is not kept.
        graphs: of the worker.

    Raises:
        TypeError: the tensor is sparse, nested, or of a subclass of Tensor.
    """

    def __init__(self, tensor: Tensor, graphs: Graphs) -> None:
        self._form = TensorForm.of(tensor)
        self._marked = boundary.is_unchangeable(tensor)
        self._elements = elements_of(graphs.unowned(tensor.detach()))

    @classmethod
    def filled(cls, tensor: Tensor, graphs: Graphs) -> tuple[Tensor, StaticTensor]:
        """A leaf like a tensor, with its values, in the pool of the graphs; and its static tensor."""
        form = TensorForm.of(tensor)
        with graphs.allocating():
            leaf = form.tensor(form.room(tensor.device)).requires_grad_(tensor.requires_grad)
        boundary.marked_like(tensor, leaf)
        static = cls(leaf, graphs)
        static.fill(tensor)
        return leaf, static

    def fits(self, tensor: Tensor | None) -> bool:
        """Whether a tensor is of the same form."""
        form = self._form
        return (
            tensor is not None
            and (tensor.shape, tensor.dtype, tensor.requires_grad) == (form.shape, form.dtype, form.requires_grad)
            and (tensor.is_contiguous() if form.strides is None else tensor.stride() == form.strides)
        )

    def fill(self, tensor: Tensor) -> None:
        """Copies the values of a tensor, which fits."""
        if self._form.is_usual and tensor.is_contiguous():
            self._elements.copy_(tensor.detach())
        else:
            self._elements.copy_(memory_of(tensor).view(self._elements.shape))

    def copied(self) -> Tensor:
        """A copy, as a leaf with the same strides."""
        form = self._form
        if form.is_usual:
            leaf = self._elements.clone()
        else:
            room = form.room(self._elements.device)
            leaf = form.tensor(room.copy_(memory_of(self._elements).view(room.shape)))
        if form.requires_grad:
            leaf.requires_grad_()
        if self._marked:
            boundary.mark_unchangeable(leaf)
        return leaf
