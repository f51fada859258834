"""Proves a pipe on a mini-batch of the user's own: everything that it computes is compared with the plain model.

    as the model is     the pipe         with  the plain model, micro-batch by micro-batch    bitwise
    where bits differ   the plain model  with  itself, run again: some times what differs there is allowed
    with graphs         replays of it    with  the plain model, micro-batch by micro-batch    bitwise
    without dropout     the pipe         with  the plain model, the whole batch at once       relatively

All other runs of the pipe are without graphs. Dropout is left out by evaluation mode, in all modules but norms with
running statistics. Of a model in evaluation mode outputs and loss are compared. Each run begins with the same state and
the same seed. Where something differs, two runs with hooks on the layers find the first place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pipework.fsdp_private import fsdp_modules
from pipework.saving.training import random_states, set_random_states
from pipework.schedule.draw.units import aligned
from pipework.testing.comparison import MOST, ROUNDED, Compared, allowed_for, apart, differences, tolerance_of
from pipework.testing.runs import Runs, Values
from pipework.torch_private import BatchNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipework.pipe import Pipe

_PIECES: Final = "micro-batches"
_WHOLE: Final = "whole batch"
_ITSELF: Final = "itself, again"
_REPLAYED: Final = ", replayed"
_NO_DROPOUT: Final = ", without dropout"
_Found: TypeAlias = dict[str, dict[str, float]]  # how far tensors are apart, by kind and name


@dataclass(frozen=True)
class Verification:
    """What `pipe.verify` found. It is true if nothing differs; `print` shows a table.

    Attributes:
        compared: the lines of the table.
        first: the first layer whose tensors differ, and its micro-batch; empty: it was not found, or nothing differs.
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
            how = "relatively" if each.difference and not each.bitwise else "bitwise"  # 0: all bits are equal
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
    if "return_output" in keywords and pipe._attached is None:
        raise ValueError("pipe.verify got return_output=, and compares outputs anyway: leave it out")
    if fsdp_modules(pipe.partitions) or pipe.ranks.local_names:
        raise ValueError(
            "pipe.verify got a pipe of which processes hold shards of one layer (fully_shard), or other values "
            "(local_parameters=), and the plain model would need them all: verify a pipe of the same layers without"
        )
    states = random_states()
    try:
        runs = Runs(pipe, inputs, dict(keywords), target)
        with runs.instead():
            return _verification(runs)
    finally:
        set_random_states(states)


def _verification(runs: Runs) -> Verification:
    """Makes the runs, and compares their results. All processes know the differences of all, and so decide alike."""
    notes: list[str] = []
    if not runs.trains:
        notes.append("the model is in evaluation mode: gradients were not compared")
    elif not runs.grad:
        notes.append("gradients are switched off, as by torch.no_grad(): none were compared")
    elif not any(runs.of_all(any(parameter.requires_grad for parameter in runs.pipe.parameters()))):
        notes.append("no parameter requires a gradient: none of parameters were compared")
    pipe, plain = runs.of_pipe(), runs.of_plain()
    computed = [each for kind in ("outputs", "loss", "gradients") for each in plain[kind].values()]
    tolerance = max(runs.of_all(tolerance_of(computed)))
    found = _differences(runs, pipe, plain)
    replays, why = runs.of_replays()
    found |= {kind + _REPLAYED: own for kind, own in _differences(runs, replays, plain).items()}
    if why:
        notes.append(f"{'some processes' if replays else 'all runs'} were without graphs: {why}")
    bounds = {"gradients": tolerance} if runs.rounds else {}  # by kind; see "Where it ends" in docs/exactness.md
    allowed: dict[str, float] = {}  # by kind, if the plain model differs from itself
    lines, comparable = _table(_PIECES, found, bounds, allowed), True
    notes += [_OTHER_ORDER] if any(each.difference and not each.bitwise for each in lines) else []
    if any(each.first for each in lines):
        # Kernels that add in any order, such as those of flash attention's backward, give no bits to compare with.
        again = _differences(runs, runs.of_plain(), plain)
        every = {f"{kind}: {name}": each for kind, own in again.items() for name, each in own.items()}
        itself = Compared.of("plain model", _ITSELF, every, MOST, "differs from itself")
        comparable = not itself.first
        if comparable and itself.difference:
            allowed = _allowed(again, tolerance, notes)
        lines = [*(_table(_PIECES, found, bounds, allowed) if comparable else ()), itself]
    if not runs.has_whole:
        notes.append("micro-batches were given, or split= made them and the loss is outside: there is no whole batch")
    elif comparable:
        if runs.trains:
            runs.without_dropout = True
            pipe = runs.of_pipe()
        plain = runs.of_plain(whole=True)
        found = _differences(runs, runs.without_averages(pipe), runs.without_averages(plain))
        suffix = _NO_DROPOUT if runs.trains else ""
        lines += _table(_WHOLE, found, dict.fromkeys(found, tolerance), allowed, suffix)
    differ = [each for each in lines if each.first]
    if not differ:
        return Verification(tuple(lines), notes=tuple(notes))
    if all(each.what.endswith(_REPLAYED) for each in differ):
        return Verification(tuple(lines), reasons=(_BAKED_IN,), notes=tuple(notes))
    wrong = {each.against for each in differ}
    against = next(each for each in (_PIECES, _ITSELF, _WHOLE) if each in wrong)
    whole = against == _WHOLE
    runs.without_dropout = whole and runs.trains
    forward = max([tolerance * whole, *(most for kind, most in allowed.items() if kind != "gradients")])
    place = _first_place(runs, whole, forward, max(forward, allowed.get("gradients", 0.0)))
    kinds = {each.what.removesuffix(_NO_DROPOUT): each.first for each in lines if each.against == against}
    return Verification(tuple(lines), place, tuple(_reasons(runs, against, kinds)), tuple(notes))


def _differences(runs: Runs, values: Values, reference: Values) -> _Found:
    """By kind and name, how far apart the values of all processes are."""
    found: _Found = {kind: {} for kind in values}
    for told in runs.of_all({kind: differences(own, reference[kind]) for kind, own in values.items()}):
        for kind, own in told.items():
            for name, each in own.items():
                found[kind][name] = max(each, found[kind].get(name, 0.0))
    return found


def _allowed(again: _Found, tolerance: float, notes: list[str]) -> dict[str, float]:
    """How far the pipe may be apart, for the kinds in which the plain model differs from itself."""
    own = {kind: max(found.values()) for kind, found in again.items() if found}
    if "loss" in own:  # one number may be equal by chance
        own["loss"] = max(own["loss"], own.get("outputs", own.get("gradients", 0.0)))
    allowed = {kind: allowed_for(each, tolerance) for kind, each in own.items() if each}
    texts = [f"{own[kind]:.2g} in {kind} ({most:.2g} was allowed)" for kind, most in allowed.items()]
    notes += [_INEXACT.format(", ".join(texts)), _ANY_ORDER]
    return allowed


def _first_place(runs: Runs, whole: bool, forward: float, backward: float) -> str:
    """The first place where something differs in any process, found by two further runs with hooks; empty: none.

    Args:
        runs: as they were when something differed.
        whole: whether the plain model gets the whole batch, whose gradients of layers are not compared.
        forward: the tolerance of what layers give, relative to the largest element; 0: other bits count.
        backward: likewise, of gradients.
    """
    mine, theirs = runs.traced(runs.of_pipe), runs.traced(functools.partial(runs.of_plain, whole=whole))
    own, places = mine.joined() if whole else mine.seen, []
    for order, (key, reference) in enumerate(theirs.seen.items()):
        micro_batch, layer, is_gradient, _ = key
        if whole and (key not in own or own[key].shape != reference.shape):
            continue  # a gradient, or what has no rows
        if apart(own.get(key), reference) > (backward if is_gradient else forward):
            what = "the gradient of its output" if is_gradient else "its output"
            where = "" if whole else f"micro-batch {micro_batch}, "
            places.append((theirs.turns[key], order, f"{where}layer {layer}: {what}"))
    found = [each for each in runs.of_all(min(places, default=None)) if each is not None]
    return min(found)[-1] if found else ""


def _reasons(runs: Runs, against: str, kinds: Mapping[str, str]) -> list[str]:
    """The usual reasons, and what to do.

    Args:
        runs: of the pipe.
        against: what the pipe was compared with.
        kinds: the first name that differs of each kind; empty: none does.
    """
    if against == _ITSELF:
        return [_OTHER_NUMBERS]
    if against == _PIECES:
        return [_COUNTED_TWICE.format(kinds["attributes"])] if kinds.get("attributes") else [_STATE]
    norms = [
        f"{name!r} ({type(module).__name__})"
        for name, module in runs.named_modules.items()
        if isinstance(module, BatchNorm) and module.training
    ]
    if norms := [each for told in runs.of_all(norms) for each in told]:
        return [_BATCH_NORM.format(", ".join(norms[:3]))]
    if kinds.get("outputs") == "":
        return [_LOSS] if kinds.get("loss") else [_BACKWARD]
    return [_ROWS, _CUT, *([_OF_LAYER] if runs.executor.settings.loss_fn is None else [])]


def _table(
    against: str, found: _Found, bounds: Mapping[str, float], allowed: Mapping[str, float], suffix: str = ""
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
        key = kind.removesuffix(_REPLAYED)
        bound = bounds.get(key, 0.0)
        near = _WITHIN if max(own.values()) > bound else ROUNDED
        lines.append(Compared.of(kind + suffix, against, own, max(bound, allowed.get(key, 0.0)), near))
    return lines


_WITHIN: Final = "within what the plain model differs from itself"
_INEXACT: Final = "run twice, the plain model differs from itself by up to {}"
_ANY_ORDER: Final = (
    "kernels that add in any order (flash attention's backward, index_add on a GPU) make the plain model differ from "
    "itself, and so does a layer that draws numbers outside of PyTorch: "
    "torch.use_deterministic_algorithms(True) makes many such kernels exact"
)
_OTHER_ORDER: Final = (
    "gradients were not compared bitwise: the pipe adds those of micro-batches, stages or replicas in another order"
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
_BAKED_IN: Final = (
    "only replays of graphs differ: a graph keeps what Python read when it was captured, such as a number in an object "
    "or a list, also one around loss_fn, and changes none: hold it in a tensor that is changed in place (a buffer), or "
    "leave graphs= out"
)
_BATCH_NORM: Final = (
    "batch norm in training mode normalises with the rows of its micro-batch: {}. No pipeline computes it for the "
    "whole batch: take fewer chunks, eval() for these layers, or another norm; deferred_batch_norm=True is for the "
    "running statistics alone"
)
_LOSS: Final = (
    "the losses of the micro-batches do not add up to that of the whole batch. Perhaps the loss is a sum (give "
    "loss_reduction='sum'), or a mean in spite of loss_reduction='sum'; or it leaves out targets (give loss_weight=, "
    "such as lambda target: (target != -100).sum()); or it compares rows with each other, as a contrastive loss does "
    "(compute it outside, with schedule='gpipe')"
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
