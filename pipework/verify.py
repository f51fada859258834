"""Proves a pipe on a mini-batch of the user's own: everything that it computes is compared with the plain model.

    as the model is     the pipe         with  the plain model, micro-batch by micro-batch    bitwise
    without dropout     the pipe         with  the plain model, micro-batch by micro-batch    bitwise
                        the pipe         with  the plain model, the whole batch at once       relatively
    where bits differ   the plain model  with  itself, run again: some times what differs there is allowed above

Dropout is left out by evaluation mode, in all modules but norms with running statistics. Of a model in evaluation mode
outputs and loss are compared, in the second way alone. Each run begins with the same state and the same seed. Where
something differs, two runs with hooks on the layers find the first place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pipework.fsdp_private import fsdp_modules
from pipework.saving.training import random_states, set_random_states
from pipework.schedule.draw.units import aligned
from pipework.testing.comparison import MOST, ROUNDED, Compared, LayerPlace, allowed_for, differences, tolerance_of
from pipework.testing.runs import Runs, Values
from pipework.torch_private import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipework.pipe import Pipe

_PIECES: Final = "micro-batches"
_WHOLE: Final = "whole batch"
_ITSELF: Final = "itself, again"
_Found: TypeAlias = dict[str, dict[str, float]]  # how far tensors are apart, by kind and name


@dataclass(frozen=True)
class Verification:
    """What `pipe.verify` found. It is true if nothing differs; `print` shows a table.

    Attributes:
        compared: the lines of the table.
        first: the first micro-batch and layer where something differs; empty: it was not found, or nothing differs.
        reasons: why it may differ, and what to do.
        notes: what was not compared.
    """

    compared: tuple[Compared, ...]
    first: str = ""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self)

    def __bool__(self) -> bool:
        return not any(each.first for each in self.compared)

    def __str__(self) -> str:
        rows = [("", "compared with", "how", "tensors", "difference", "verdict")]
        for each in self.compared:
            how = "bitwise" if each.bitwise else "relatively"
            rows.append((each.what, each.against, how, str(each.tensors), f"{each.difference:.2g}", each.verdict))
        wrong = sum(bool(each.first) for each in self.compared)
        itself = [each for each in self.compared if each.against == _ITSELF]
        verdict = f"{wrong} of {len(self.compared)} comparisons DIFFER" if wrong else "the pipe equals the plain model"
        if any(each.first for each in itself):
            most = max(each.difference for each in itself)
            verdict = f"not compared: the plain model differs from itself by {most:.2g}"
        elif itself and not wrong:
            verdict += " as far as that equals itself"
        lines = [verdict, *(line[2:].rstrip() for line in aligned(rows, left={*range(len(rows[0]))}))]
        lines += [f"first difference: {self.first}"] if self.first else []
        lines += [f"* {text}" for text in (*self.reasons, *self.notes)]
        return "\n".join(lines)


def verify(pipe: Pipe, inputs: tuple[Any, ...], keywords: Mapping[str, Any], target: Any) -> Verification:
    """See `Pipe.verify`."""
    if not len(pipe):
        raise ValueError("a pipe without layers computes nothing that could be verified")
    if "loss_scale" in keywords and pipe._attached is None:
        raise ValueError("pipe.verify got loss_scale=, which multiplies all that is compared: leave it out")
    if fsdp_modules(pipe.partitions) or pipe.ranks.local_names:
        raise ValueError(
            "pipe.verify got a pipe of which processes hold shards of one layer (fully_shard), or other values "
            "(local_parameters=), and the plain model would need them all: verify a pipe of the same layers without"
        )
    states = random_states()
    try:
        runs = Runs(pipe, inputs, dict(keywords), target)
        with runs.instead():
            return _Checks(runs).verification()
    finally:
        set_random_states(states)


class _Checks:
    """Makes the runs, and compares their results. All processes know the differences of all, and so decide alike.

    Args:
        runs: of the pipe and of its plain model.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lines: list[Compared] = []
        self._first = ""
        self._most: dict[str, float] = {}  # by kind, how far the plain model was from itself: a run shows a part of it
        self._reasons: list[str] = []
        self._notes: list[str] = []

    def verification(self) -> Verification:
        """The result, the same in all processes."""
        runs = self._runs
        if not runs.trains:
            self._notes.append("the model is in evaluation mode: gradients were not compared")
        elif not runs.grad:
            self._notes.append("gradients are switched off, as by torch.no_grad(): none were compared")
        elif not any(runs.of_all(any(parameter.requires_grad for parameter in runs.pipe.parameters()))):
            self._notes.append("no parameter requires a gradient: none of parameters were compared")
        if runs.trains:
            self._check("", whole=False)
        runs.without_dropout = runs.trains
        self._check(", without dropout" if runs.trains else "", whole=True)
        reasons, notes = (tuple(dict.fromkeys(texts)) for texts in (self._reasons, self._notes))
        return Verification(tuple(self._lines), self._first, reasons, notes)

    def _check(self, suffix: str, *, whole: bool) -> None:
        """Makes the lines of one way, and looks for the first place where something differs.

        Args:
            suffix: of the kinds, in the table.
            whole: whether to compare with the whole batch, too.
        """
        runs, entire = self._runs, Values()
        pipe, plain = runs.of_pipe(), runs.of_plain()
        computed = [each for kind in ("outputs", "loss", "gradients") for each in plain[kind].values()]
        tolerance = max(runs.of_all(tolerance_of(computed)))
        bounds = {"gradients": tolerance} if runs.rounds else {}  # by kind; see "Where it ends" in docs/exactness.md
        allowed: dict[str, float] = {}  # by kind, if the plain model differs from itself
        found = self._differences(pipe, plain)
        lines = _table(_PIECES, found, bounds, allowed, suffix)
        comparable = True
        if any(each.first for each in lines):
            # Kernels that add in any order, such as those of flash attention's backward, give no bits to compare with.
            again = self._differences(runs.of_plain(), plain)
            every = {f"{kind}: {name}": each for kind, own in again.items() for name, each in own.items()}
            itself = Compared.of(f"plain model{suffix}", _ITSELF, every, MOST, "differs from itself")
            comparable = not itself.first
            allowed = self._allowed(suffix, again, tolerance) if comparable else {}
            lines = [*_table(_PIECES, found if comparable else {}, bounds, allowed, suffix), itself]
        if whole and runs.is_given:
            self._notes.append("the micro-batches were given, so there is no whole batch to compare with")
        elif whole and not runs.has_whole:
            self._notes.append("split= cut the batch, and the loss is outside: nothing was compared with the whole")
        elif whole and comparable:
            entire = runs.of_plain(whole=True)
            found = self._differences(runs.without_averages(pipe), runs.without_averages(entire))
            lines += _table(_WHOLE, found, dict.fromkeys(found, tolerance), allowed, suffix)
        self._lines += lines
        wrong = {each.against for each in lines if each.first}
        if wrong and not self._first:
            against = next(each for each in (_PIECES, _ITSELF, _WHOLE) if each in wrong)
            reasons = self._reasons_of(against, lines, pipe, entire)
            self._reasons += [each for told in runs.of_all(reasons) for each in told]
            own = (allowed[kind] for kind in allowed if kind != "gradients")
            forward = max(tolerance if against == _WHOLE else 0.0, *own, 0.0)
            self._first = self._place(against == _WHOLE, forward, max(forward, allowed.get("gradients", 0.0)))

    def _differences(self, values: Values, reference: Values) -> _Found:
        """By kind and name, how far apart the values of all processes are."""
        found: _Found = {kind: {} for kind in values}
        for told in self._runs.of_all({kind: differences(own, reference[kind]) for kind, own in values.items()}):
            for kind, own in told.items():
                for name, each in own.items():
                    found[kind][name] = max(each, found[kind].get(name, 0.0))
        return found

    def _allowed(self, suffix: str, again: _Found, tolerance: float) -> dict[str, float]:
        """How far the pipe may be apart, for the kinds in which the plain model differs from itself."""
        own = {kind: max(found.values()) for kind, found in again.items() if found}
        if "loss" in own:  # one number may be equal by chance
            own["loss"] = max(own["loss"], own.get("outputs", own.get("gradients", 0.0)))
        most = {kind: max(each, self._most.get(kind, 0.0)) for kind, each in own.items() if each}
        self._most.update(most)
        allowed = {kind: allowed_for(each, tolerance) for kind, each in most.items()}
        if most:
            texts = [f"{most[kind]:.2g} in {kind} ({allowed[kind]:.2g} was allowed)" for kind in most]
            self._notes += [_INEXACT.format(suffix, ", ".join(texts)), _ANY_ORDER]
        return allowed

    def _place(self, whole: bool, forward: float, backward: float) -> str:
        """The first place where something differs in any process, found by two further runs with hooks; empty: none.

        Args:
            whole: whether the plain model gets the whole batch.
            forward: the tolerance of what layers give.
            backward: the tolerance of gradients.
        """
        runs = self._runs
        mine, theirs = runs.traced(runs.of_pipe), runs.traced(functools.partial(runs.of_plain, whole=whole))
        place = mine.first_difference(theirs, forward, backward, whole=whole)
        if place is not None:
            # Layers of other processes come before or after all of this one; for gradients the other way round.
            offset = min(runs.pipe._partitions) * 1_000_000 * (-1 if place.is_gradient else 1)
            place = place._replace(order=place.order + offset)
        places = [LayerPlace(*each) for each in runs.of_all(place) if each is not None]
        return str(min(places)) if places else ""

    def _reasons_of(self, against: str, lines: Sequence[Compared], pipe: Values, entire: Values) -> list[str]:
        """The usual reasons, and what to do."""
        if against == _ITSELF:
            return [_OTHER_NUMBERS]
        kinds = {each.what.partition(",")[0]: each.first for each in lines if each.against == against}
        if against == _PIECES:
            return [_COUNTED_TWICE.format(kinds["attributes"])] if kinds.get("attributes") else [_STATE]
        norms = [
            f"{name!r} ({type(module).__name__})"
            for name, module in self._runs.named_modules.items()
            if isinstance(module, BatchNorm) and module.training
        ]
        if norms:
            return [_BATCH_NORM.format(", ".join(norms[:3]))]
        settings, loss = self._runs.executor.settings, []
        if kinds.get("loss") and entire["loss"]:  # it is in this process
            whole, pieces = (float(each["loss"]["the loss"]) for each in (entire, pipe))
            weighed = "rows" if settings.loss_weight is None else "loss_weight"
            way = "sum" if settings.loss_reduction == "sum" else f"mean by {weighed}"
            loss = [_LOSS.format(whole, pieces, way, self._runs.micro_batches)]
        if kinds.get("outputs") == "":
            return loss if kinds.get("loss") else [_BACKWARD]
        return [_ROWS, _CUT, *([_OF_LAYER] if settings.loss_fn is None else [])]


def _table(
    against: str, found: _Found, bounds: Mapping[str, float], allowed: Mapping[str, float], suffix: str
) -> list[Compared]:
    """A line for each kind of which there are tensors.

    Args:
        against: what they were compared with.
        found: the differences.
        bounds: by kind, of rounding; none: bitwise.
        allowed: by kind, where the plain model differs from itself.
        suffix: of the kinds.
    """
    lines = []
    for kind, own in ((kind, own) for kind, own in found.items() if own):
        bound = bounds.get(kind, 0.0)
        near = _WITHIN if max(own.values()) > bound else ROUNDED
        lines.append(Compared.of(kind + suffix, against, own, max(bound, allowed.get(kind, 0.0)), near))
    return lines


_WITHIN: Final = "within what the plain model differs from itself"
_INEXACT: Final = "run twice{}, the plain model differs from itself by up to {}"
_ANY_ORDER: Final = (
    "kernels that add in any order (flash attention's backward, index_add on a GPU) make the plain model differ from "
    "itself, and so does a layer that draws numbers outside of PyTorch: "
    "torch.use_deterministic_algorithms(True) makes many such kernels exact"
)
_OTHER_NUMBERS: Final = (
    "the plain model differs too much from itself to compare with it: a layer draws numbers outside of PyTorch "
    "(random, NumPy), or reads what changes from run to run (time). Draw with torch, and give such values as inputs"
)
_COUNTED_TWICE: Final = (
    "a layer keeps a state, {}, in an attribute, which a recomputation changes once more (`self.tokens += t` counts "
    "twice): register it as a buffer, or leave it alone while pipework.model.checkpoint.is_recomputing()"
)
_STATE: Final = (
    "a layer keeps a state from one micro-batch to the next, draws numbers outside of PyTorch, or reads what depends "
    "on the thread or the order of calls: give it such values as inputs. If none does, this is a fault of pipework"
)
_BATCH_NORM: Final = (
    "batch norm in training mode normalises with the rows of its micro-batch: {}. No pipeline computes it for the "
    "whole batch: take fewer chunks, eval() for these layers, or another norm; deferred_batch_norm=True is for the "
    "running statistics alone"
)
_LOSS: Final = (
    "the loss of the whole batch is {:.7g}, and that of the pipe {:.7g}, the {} of its values for {} micro-batches. "
    "Perhaps it is a sum (give loss_reduction='sum'), or a mean in spite of loss_reduction='sum'; or it leaves out "
    "targets (loss_weight=, such as lambda target: (target != -100).sum()); or it compares rows with each other, as a "
    "contrastive loss does (compute it outside, with schedule='gpipe')"
)
_OF_LAYER: Final = (
    "the last layer returns a 0-dimensional output or loss for each micro-batch, and the pipe takes the mean by rows: "
    "let it return the mean, not the sum, or its rows; with a loss_fn, loss_reduction='sum' adds up"
)
_ROWS: Final = (
    "a layer mixes rows (attention or statistics over the batch dimension, x / len(x)): it sees those of its "
    "micro-batch alone, so let it work on each row, or do it outside of the pipe"
)
_CUT: Final = (
    "an input is cut along a dimension that is not its rows, such as a mask: Chunk(value, dim=1) names the dimension, "
    "NoChunk(value) gives every micro-batch all of it, and MicroBatches([...]) or split= say what each one gets"
)
_BACKWARD: Final = (
    "a backward is not linear in its gradient, or adds a term of its own (an auxiliary loss, a hook that clamps): it "
    "does so once for each micro-batch. Add such a term to the loss"
)
