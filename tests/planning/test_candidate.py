from dataclasses import replace
from pathlib import Path

import pytest

from pipework import Plan
from pipework.planning import Profile
from pipework.planning.layer_costs import LinkSpeed
from tests.planning.made_profiles import made
from tests.planning.test_search import planned

TWO_KINDS = made([1.0] * 4, speeds={"a": 1.0, "b": 1.0})
NO_LINKS = "messages are taken to cost nothing between {}: the profile has no link there; measure"
NO_LOSS = "the loss is taken to cost nothing: the profile was made without target="


def without(profile: Profile, *ends: tuple[str, str]) -> Profile:
    return replace(profile, links={each: link for each, link in profile.links.items() if each not in ends})


def notes(profile: Profile, *devices: str) -> tuple[str, ...]:
    return planned(profile, devices, schedules=["1f1b"], iterations=10).notes


def test_all_is_known() -> None:
    assert notes(TWO_KINDS, "a", "b") == ()
    assert notes(replace(TWO_KINDS, links={("b", "a"): LinkSpeed(1e-3, 1e9)}), "a", "b") == ()
    assert notes(replace(made([1.0] * 4), links={}), "device") == ()  # one worker sends nothing


def test_no_links(tmp_path: Path) -> None:
    plan = planned(replace(made([1.0] * 4), links={}), schedules=["1f1b"], iterations=10)
    (note,) = plan.notes
    assert note.startswith(NO_LINKS.format("device and device"))
    assert str(plan).splitlines()[-1] == note
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").notes == plan.notes


@pytest.mark.parametrize(("devices", "links"), [(("a", "b"), "a and b"), (("a", "a"), "a and a")])
def test_the_link_that_is_missing_is_named(devices: tuple[str, str], links: str) -> None:
    profile = without(TWO_KINDS, ("a", "b"), ("b", "a"), ("a", "a"))
    (note,) = notes(profile, *devices)
    assert note.startswith(NO_LINKS.format(links))


def test_no_loss() -> None:
    assert notes(replace(made([1.0] * 4), loss_inside=False), "device", "device") == (NO_LOSS,)


def test_micro_batches_far_from_those_that_were_measured() -> None:
    def notes_of(batch: int) -> tuple[str, ...]:
        return planned(few, ("device",), chunks=4, batch=batch, schedules=["gpipe"], iterations=4).notes

    few = replace(made([1.0] * 4, batch=16, rows=(2, 4)))
    assert notes_of(4) == notes_of(16) == notes_of(32) == ()
    assert notes_of(36) == (
        "micro-batches of 9 rows are taken to cost what a line through measurements says: the profile has those of "
        "2 to 4 rows",
    )
