"""The table of kinds: what each kind of action needs, gives, holds and costs, and how pictures show it.

A new kind is a row of this table, and a handler in `HANDLERS` (`runtime/stage/actions.py`). Everything else reads the
row: checks, simulation, memory, pictures and files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Final, Literal, NamedTuple


class ActionKind(NamedTuple):
    """A row of the table.

    Attributes:
        letter: the kind in an action, and in its text.
        name: for pictures and traces.
        scope: what an action is for: one micro-batch; a copy of what one holds, to the host or back; a transfer of one;
            or a whole stage, and no micro-batch.
        phase: ``"forward"``: before a loss outside of the pipe; ``"backward"``: after it, and never in a schedule for
            inference.
        needs: the products of its own stage and micro-batch for which it waits.
        arrives: the product of other stages for which it waits: ``"F"``, a value from the stage before; ``"B"``, a
            gradient from the stage after.
        gives: its product, for which others wait. ``I`` gives that of ``B``.
        before: the kinds that wait for it, on its stage and micro-batch, if it occurs there.
        always: whether each stage has one for each micro-batch, or instead all of the kinds in `adds`.
        partner: a kind that occurs just where this one does.
        adds: the halves of a backward whose gradients of parameters it adds.
        reads: whether it reads the weights of its stage.
        peer: the distance in stages to the other end of a transfer.
        cost: the attribute of :class:`Costs` that has its time; ``""``: it takes none.
        beside: whether the worker goes on meanwhile.
        holds: the attribute of :class:`Costs` that has the memory after it, of its micro-batch, or of the stage's
            weights; ``""``: it frees that memory for good; None: the memory stays as it was.
        leaves: the same for the memory after the micro-batch's forward, if this kind follows.
        color: the fill of its cells in pictures.

    Example:
        >>> KINDS["R"].name, KINDS["R"].needs, KINDS["R"].before
        ('recompute', ('F',), ('B', 'I'))
    """

    letter: str
    name: str
    scope: Literal["micro-batch", "copy", "transfer", "stage"] = "micro-batch"
    phase: Literal["forward", "backward", "either"] = "backward"
    needs: tuple[str, ...] = ()
    arrives: str = ""
    gives: str = ""
    before: tuple[str, ...] = ()
    always: bool = False
    partner: str = ""
    adds: tuple[str, ...] = ()
    reads: bool = False
    peer: int = 0
    cost: str = ""
    beside: bool = False
    holds: str | None = None
    leaves: str = ""
    color: str = "#cccccc"


class Kinds(Mapping[str, ActionKind]):
    """A table of kinds, by letter.

    Args:
        rows: the kinds, in the order of legends.

    Raises:
        ValueError: two kinds have the same letter, or a kind waits for a product that no kind gives.

    Example:
        >>> own = Kinds(*KINDS.values(), ActionKind("P", "compress", needs=("F",), holds="checkpoint_activation"))
        >>> from pipework.schedule import Action
        >>> Action.parse("2P3", own)
        Action(kind='P', stage=2, micro_batch=3)
    """

    def __init__(self, *rows: ActionKind) -> None:
        self._rows = {row.letter: row for row in rows}
        for row in rows:
            if self._rows[row.letter] is not row:
                names = f"{row.name!r} and {self._rows[row.letter].name!r}"
                raise ValueError(f"the kinds {names} both have the letter {row.letter!r}: give each its own")
            missing = {*row.needs, row.arrives} - {"", *(other.gives for other in rows)}
            if missing:
                raise ValueError(f"the kind {row.letter!r} needs {min(missing)!r}, which no kind of the table gives")

    def __getitem__(self, letter: str) -> ActionKind:
        return self._rows[letter]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Kinds({', '.join(self)})"

    def letters(self, **wanted: object) -> tuple[str, ...]:
        """The kinds whose rows have these values.

        Example:
            >>> KINDS.letters(gives="B"), KINDS.letters(scope="micro-batch")
            (('B', 'I'), ('F', 'B', 'I', 'W', 'R'))
        """
        return tuple(
            row.letter for row in self.values() if all(getattr(row, name) == value for name, value in wanted.items())
        )

    @cached_property
    def makers(self) -> dict[str, tuple[str, ...]]:
        """Each product to the kinds that give it."""
        return {name: self.letters(gives=name) for name in {row.gives for row in self.values()}}

    @cached_property
    def text(self) -> re.Pattern[str]:
        """The text of an action: stage, kind, micro-batch, and a peer that is not the neighbour."""
        return re.compile(rf"([0-9]+)({'|'.join(map(re.escape, self))})([0-9]*)(?:@([0-9]+))?")


KINDS: Final = Kinds(
    ActionKind(
        "F", "forward", phase="forward", arrives="F", gives="F", always=True, reads=True, cost="forward",
        holds="activation", color="#84b0e3",
    ),
    ActionKind(
        "B", "backward", needs=("F",), arrives="B", gives="B", always=True, adds=("I", "W"), reads=True,
        cost="backward", holds="", color="#86c47c",
    ),
    ActionKind(
        "I", "input gradient", needs=("F",), arrives="B", gives="B", partner="W", adds=("I",), reads=True,
        cost="input_gradient", holds="waiting", color="#56b6ab",
    ),
    # It multiplies what I has kept, and reads no weight.
    ActionKind(
        "W", "weight gradient", needs=("B",), partner="I", adds=("W",), cost="weight_gradient", holds="",
        color="#c3e3b0",
    ),
    ActionKind(
        "R", "recompute", needs=("F",), gives="R", before=("B", "I"), reads=True, cost="recompute",
        holds="activation", leaves="checkpoint_activation", color="#a3b1c4",
    ),
    # What a micro-batch holds goes to the memory of the host, and comes back. The worker goes on meanwhile.
    ActionKind(
        "O", "offload", "copy", "forward", needs=("F",), gives="O", partner="L", cost="offload", beside=True,
        holds="offloaded", color="#d9a5b3",
    ),
    ActionKind(
        "L", "load", "copy", needs=("O",), gives="L", before=("B", "I", "R"), partner="O", cost="reload", beside=True,
        holds="activation", color="#e8c07d",
    ),
    # Of values and gradients between workers; the names and meanings from here on are those of PyTorch.
    ActionKind("SEND_F", "send", "transfer", "forward", needs=("F",), peer=1, cost="transfer", beside=True),
    ActionKind("RECV_F", "receive", "transfer", "forward", peer=-1, cost="transfer", beside=True),
    ActionKind("SEND_B", "send", "transfer", needs=("B",), peer=-1, cost="transfer", beside=True),
    ActionKind("RECV_B", "receive", "transfer", peer=1, cost="transfer", beside=True),
    # The gradients of a stage are summed over replicas; its weights are gathered, and freed again.
    ActionKind("REDUCE_GRAD", "reduce", "stage", cost="reduce_gradient", beside=True),
    ActionKind("UNSHARD", "gather", "stage", "either", cost="unshard", holds="weights"),
    ActionKind("RESHARD", "free", "stage", "either", holds=""),
)  # fmt: skip
"""``F`` forward, ``B`` backward, its halves ``I`` and ``W``, ``R`` recompute, ``O`` offload, ``L`` load, and others."""
