"""What a user has probably not meant: it is looked for in the first mini-batches of a pipe, and told once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.autograd.nodes import UndeliveredLosses
from pipework.model.loss.check import Pairs, loss_warnings
from pipework.model.loss.settings import may_be_other
from pipework.model.marks import MIXED
from pipework.model.row_warnings import IGNORE, OutputRows, batch_second_noticed, modules_with_batch_second
from pipework.spot_checks import FIRST, is_checked

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pipework.autograd.nodes import LossInside
    from pipework.model.loss.settings import LossSettings
    from pipework.model.mini_batch import MiniBatch
    from pipework.model.row_dimensions import Layout
    from pipework.runtime.step import Step
    from pipework.runtime.transport import Message

_ONE_ROW: Final = 2  # mini-batches of one row, of which one alone may be a trial


class Doubts:
    """Adds to the warnings of mini-batches.

    Args:
        warns: whether anything is looked for.
    """

    def __init__(self, *, warns: bool) -> None:
        self.warns = warns
        self._checks_loss, self._of_targets, self._pairs = True, 0, Pairs()
        self._scaler_checks = FIRST
        self._undelivered = UndeliveredLosses()
        self.expect_new_layers()

    def expect_new_layers(self) -> None:
        """The next mini-batches that are cut show how the layers treat rows, and whether the loss is a mean of rows."""
        self._checks_inputs = self._checks_outputs = True
        self._of_targets = min(self._of_targets, FIRST - 1)
        self._pairs = Pairs()
        self._of_one_row = 0
        self._output_rows = OutputRows()

    def of_targets(self, batch: MiniBatch, settings: LossSettings, *, graphs: bool) -> dict[int, Any] | None:
        """Looks at the padding of targets. Returns a dict for what `of_loss` looks at, see `InnerLoss.seen`.

        Args:
            batch: whose targets are cut.
            settings: of the loss.
            graphs: whether later steps are replays of graphs, which show nothing.
        """
        if not self.warns or not self._checks_loss or batch.targets is None:
            return None
        number, self._of_targets = self._of_targets, self._of_targets + 1
        if (text := settings.padding_warning(batch.targets, batch.weighing, waits=number < FIRST)) is not None:
            batch.warnings.append(text)
            self._checks_loss = False  # the loss is told by the same text
            return None
        is_looked_at = number < FIRST if graphs else is_checked(number)
        if is_looked_at and batch.shows_rows and may_be_other(settings.loss_fn, settings.loss_weight):
            inputs = batch.micro_batches or [((), None)] * len(batch.rows)  # those of another process are not there
            pairs = zip(batch.targets, inputs, strict=True)
            pair = self._pairs.choose([(*target[0], *own[0]) for target, own in pairs])
            return None if pair is None else dict.fromkeys(pair)
        return None

    def of_one_row(self, batch: MiniBatch, chunks: int) -> None:
        """Looks whether the first mini-batches are one row each, so that nothing is pipelined."""
        if not self._checks_inputs or not batch.is_cut or [*batch.rows] != [1] or chunks == 1:
            return
        self._of_one_row += 1
        if self.warns and self._of_one_row == _ONE_ROW:
            batch.warnings.append(
                f"each mini-batch so far has one row, which makes one micro-batch in place of chunks={chunks}: the "
                "workers wait for each other and nothing is pipelined. Give more rows; or if sequences are packed one "
                f"behind the other in this row, cut between them, with split= or MicroBatches: {IGNORE}"
            )

    @contextlib.contextmanager
    def of_layers(self, batch: MiniBatch, layers: nn.Module, lock: threading.Lock) -> Iterator[None]:
        """Looks for uses in which dimension 0 is not that of the rows, in the first mini-batch that is cut."""
        modules = modules_with_batch_second(layers.named_children())
        with batch_second_noticed(modules, {*batch.rows}, lock) as found:
            yield
        self._checks_inputs = False
        batch.warnings += found

    def looks_at_layers(self, batch: MiniBatch) -> bool:
        """Whether `of_layers` is to be entered around the run of the workers."""
        return self.warns and self._checks_inputs and batch.shows_rows

    def of_loss(self, batch: MiniBatch, settings: LossSettings) -> None:
        """Looks whether the loss of two micro-batches together is what the pipe makes of the loss of each."""
        assert batch.loss is not None
        found = loss_warnings(settings, batch.loss, batch.rows)
        self._checks_loss &= not found
        batch.warnings += found

    def of_backward(self, batch: MiniBatch, shared: LossInside) -> None:
        """Looks whether any of the first losses was brought backward."""
        if self.warns:
            batch.warnings += self._undelivered.doubts()
            self._undelivered.add(shared)

    def lacks_scaler(self, step: Step, settings: LossSettings) -> bool:
        """Whether float16 gradients were computed without a scale, also if nothing warns."""
        if settings.grad_scaler is not None or not self._scaler_checks:
            return False
        self._scaler_checks -= 1
        parameters = [each for stage in step.stages for each in step.parameters(stage)]
        kinds = {each.device.type for each in parameters} - {"meta"}  # of which autocast refuses to be asked
        casts = filter(torch.is_autocast_enabled, kinds)
        return torch.float16 in {*[each.dtype for each in parameters], *map(torch.get_autocast_dtype, casts)}

    def of_outputs(self, batch: MiniBatch, outputs: Sequence[Message], layout: Layout) -> None:
        """Looks whether dimension 0 of the outputs, along which they are joined, is that of the rows.

        Of the outputs of which more is known, those that are not made of rows are named.
        """
        if not self.warns or not batch.is_cut:
            return
        if layout.outputs is None:
            batch.warnings += self._output_rows.warnings(outputs, batch.rows)
        elif self._checks_outputs:
            self._checks_outputs = False
            if mixed := [name for name, dim in layout.of_outputs(*outputs[0]).items() if dim == MIXED]:
                batch.warnings.append(
                    f"the pipe returns None in place of {', '.join(mixed)}: no dimension has the rows of the batch, so "
                    "that those of micro-batches do not make that of the whole batch. Compute it outside of the pipe, "
                    f"from what has rows: {IGNORE}"
                )
