"""What the times of a plan leave out, because the profile has no numbers for it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from pipework.planning.search.candidate import kinds_of
from pipework.schedule.draw.units import time_text

if TYPE_CHECKING:
    from pipework.planning.search.candidate import Candidate

_LITTLE = 0.01  # of a step
_LINKS = "measure links with pipework.profile on the devices, or give them with dataclasses.replace(profile, links=...)"


def doubts(candidate: Candidate) -> list[str]:
    """A line for each thing that is taken to cost nothing: messages without a link, skips, a loss without a target."""
    profile, choice = candidate.request.profile, candidate.choice
    kinds = kinds_of(candidate.request, choice.order, choice.placement)
    hops = {
        ends
        for ends, (here, there) in zip(pairwise(kinds), pairwise(choice.placement), strict=True)
        if here != there and not profile.has_link(*ends)
    }
    found = []
    if hops and not profile.links:
        found.append(f"messages between devices are taken to cost nothing: the profile has no links; {_LINKS}")
    elif hops:
        missing = " and ".join(sorted({f"between {min(ends)!r} and {max(ends)!r}" for ends in hops}))
        found.append(f"messages {missing} are taken to cost nothing: the profile has no such link; {_LINKS}")
    late = sum(
        profile.transfer(kinds[here], kinds[there], size)
        for here, there, size in candidate.request.sums(choice.chunks).skips_between(choice.balance)
        if choice.placement[here] != choice.placement[there]
    )
    if late * choice.chunks > _LITTLE * candidate.seconds:
        found.append(
            "skip connections between workers are taken to arrive in time; on their links, those of a micro-batch "
            f"take {time_text(late, 's')}"
        )
    if not profile.loss_inside:
        found.append("the loss is taken to cost nothing: the profile was made without target=")
    return found
