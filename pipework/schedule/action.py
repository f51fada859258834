"""An action: one step of a worker, such as the forward of stage 2 for micro-batch 3."""

from __future__ import annotations

from typing import Final, NamedTuple

from pipework.schedule.kinds import KINDS, Kinds

NONE: Final = -1
"""The micro-batch or peer of an action that has none."""


class Action(NamedTuple):
    """One step of a worker.

    A plain tuple of plain values, because the runtime unpacks it for every action of every step.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` full backward, ``"I"`` input-gradient half of a backward, ``"W"``
            weight-gradient half, ``"R"`` recompute the forward of a checkpointed micro-batch, ``"O"`` and ``"L"`` copy
            what a micro-batch holds to the memory of the host and back. A lowered schedule also has ``"SEND_F"``,
            ``"RECV_F"`` (values), ``"SEND_B"``, ``"RECV_B"`` (gradients) and ``"REDUCE_GRAD"``; one for sharded
            weights has ``"UNSHARD"`` and ``"RESHARD"``.
        stage: number of the stage, from 0.
        micro_batch: number of the micro-batch, from 0; -1 if the action is for all of them.
        peer: the stage at the other end of a transfer; -1 if the action is no transfer.

    Example:
        >>> str(Action("F", 2, 3))
        '2F3'
        >>> Action.parse("2F3")
        Action(kind='F', stage=2, micro_batch=3)
    """

    kind: str
    stage: int
    micro_batch: int = NONE
    peer: int = NONE

    @property
    def computes(self) -> bool:
        """Whether the action is for a micro-batch and no transfer."""
        return self[3] < 0 <= self[2]

    def __str__(self) -> str:
        kind, stage, micro_batch, peer = self
        number = "" if micro_batch == NONE else micro_batch
        # PyTorch's form has transfers to the next stage only; those to others name the peer.
        far = "" if peer == NONE or peer == neighbour(kind, stage) else f"@{peer}"
        return f"{stage}{kind}{number}{far}"

    def __repr__(self) -> str:
        fields = zip(self._fields, self, strict=True)
        return f"Action({', '.join(f'{name}={value!r}' for name, value in fields if value != NONE)})"

    @classmethod
    def parse(cls, text: str, table: Kinds = KINDS) -> Action:
        """Read the text form ``{stage}{kind}{micro_batch}``.

        The peer of a transfer is the next stage in its direction unless the text ends in ``@{peer}``.

        Args:
            text: such as ``"2F3"``, ``"2SEND_F3"``, ``"0SEND_F3@4"`` or ``"2REDUCE_GRAD"``; white space around it is
                ignored.
            table: the kinds that there are.

        Returns:
            The action; ``str`` of it is the text again.

        Raises:
            ValueError: the text does not have that form.

        Example:
            >>> Action.parse("0B12").micro_batch
            12
            >>> Action.parse("0SEND_F3").peer, Action.parse("0SEND_F3@4").peer
            (1, 4)
        """
        match = table.text.fullmatch(text.strip())
        scope = table[match[2]].scope if match else ""
        if match is None or bool(match[3]) == (scope == "stage") or bool(match[4] and scope != "transfer"):
            raise ValueError(
                f"{text!r} is not an action: wanted stage, kind ({', '.join(table.letters(scope='micro-batch'))}) and "
                "micro-batch without spaces; write '2F3' for the forward of stage 2, micro-batch 3, '2SEND_F3' for a "
                "transfer, '2REDUCE_GRAD'"
            )
        kind, stage = match[2], int(match[1])
        peer = int(match[4]) if match[4] else neighbour(kind, stage)
        return cls(kind, stage, int(match[3]) if match[3] else NONE, peer)


def neighbour(kind: str, stage: int) -> int:
    """The stage at the other end of a transfer between adjacent stages; -1 for other actions.

    Example:
        >>> neighbour("SEND_F", 2), neighbour("SEND_B", 2), neighbour("F", 2)
        (3, 1, -1)
    """
    step = KINDS[kind].peer if kind in KINDS else 0
    return stage + step if step else NONE
