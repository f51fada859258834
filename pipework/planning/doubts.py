"""What the times of a plan leave out, because the profile has no numbers for it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pipework.planning.search.candidate import kinds_of

if TYPE_CHECKING:
    from pipework.planning.search.candidate import Candidate

_FAR = 2  # times as many rows as were measured, or as few
_LINKS = (
    "measure links with pipework.planning.profile on the devices, or give them with "
    "dataclasses.replace(profile, links=...)"
)


def doubts(candidate: Candidate) -> list[str]:
    """A line for each thing that the profile does not say: messages without a link, a loss without a target, rows."""
    profile, choice = candidate.request.profile, candidate.choice
    kinds = kinds_of(candidate.request, choice.order, choice.placement)
    ways = {*pairwise(range(len(kinds))), *candidate.request.sums(choice.chunks).skips_between(choice.balance)}
    hops = {
        (kinds[here], kinds[there])
        for here, there in ways
        if choice.placement[here] != choice.placement[there] and not profile.has_link(kinds[here], kinds[there])
    }
    found = []
    if hops and not profile.links:
        found.append(f"messages between devices are taken to cost nothing: the profile has no links; {_LINKS}")
    elif hops:
        missing = " and ".join(sorted({f"between {min(ends)!r} and {max(ends)!r}" for ends in hops}))
        found.append(f"messages {missing} are taken to cost nothing: the profile has no such link; {_LINKS}")
    if not profile.loss_inside:
        found.append("the loss is taken to cost nothing: the profile was made without target=")
    rows, measured = -(-candidate.request.batch // choice.chunks), profile.rows
    if rows > _FAR * measured[-1] or _FAR * rows < measured[0]:
        sizes = f"{measured[0]:,} to {measured[-1]:,}" if len(measured) > 1 else f"{measured[0]:,}"
        found.append(
            f"micro-batches of {rows:,} rows are taken to cost what a line through measurements says: the profile has "
            f"those of {sizes} rows"
        )
    return found
