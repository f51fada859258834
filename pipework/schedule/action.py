"""An action: one step of a worker, such as the forward of stage 2 for micro-batch 3."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KINDS: Final = ("F", "B", "I", "W", "R")
"""Forward, full backward, input-gradient half, weight-gradient half, recompute."""

_TEXT: Final = re.compile(r"([0-9]+)([FBIWR])([0-9]+)")


class Action(NamedTuple):
    """One step of a worker.

    A plain tuple of plain values, because the runtime unpacks it for every action of every step.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` full backward, ``"I"`` input-gradient half of a backward, ``"W"``
            weight-gradient half, ``"R"`` recompute the forward of a checkpointed micro-batch.
        stage: which stage, from 0.
        micro_batch: which piece of the mini-batch, from 0.

    Example:
        >>> str(Action("F", 2, 3))
        '2F3'
        >>> Action.parse("2F3")
        Action(kind='F', stage=2, micro_batch=3)
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form ``{stage}{kind}{micro_batch}``.

        Args:
            text: such as ``"2F3"``; white space around it is ignored.

        Returns:
            The action; ``str`` of it is the text again.

        Raises:
            ValueError: the text is not of that form.

        Example:
            >>> Action.parse("0B12").micro_batch
            12
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: wanted stage, kind ({', '.join(KINDS)}) and micro-batch without spaces; "
                "write '2F3' for the forward of stage 2, micro-batch 3"
            )
        return cls(match[2], int(match[1]), int(match[3]))
