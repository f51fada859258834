import pytest
import torch

from pipework.planning.layer_costs import LinkSpeed
from pipework.planning.measuring.links import measure_links


def test_threads_hand_over_without_copying() -> None:
    lines: list[str] = []
    ((ends, speed),) = measure_links([torch.device("cpu")], lines.append).items()
    assert ends == ("cpu", "cpu")
    assert speed.seconds(2**40) < 0.01
    assert lines[0].startswith("cpu to cpu: ")


def copies_between(places: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, str]], set[object]]:
    """The copies that are measured, and the links that are found."""
    copied: list[tuple[str, str]] = []

    def copy(sender: torch.device, receiver: torch.device) -> LinkSpeed:
        copied.append((str(sender), str(receiver)))
        return LinkSpeed(1.0, 1.0)

    monkeypatch.setattr("pipework.planning.measuring.links._copy", copy)
    monkeypatch.setattr("pipework.planning.measuring.links.device_kind", lambda place: place.type)
    found = measure_links([torch.device(place) for place in places], lambda line: None)
    return copied, {*found}


def test_two_devices_of_a_kind_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, found = copies_between(["cuda:0", "cuda:0", "cuda:1", "cpu"], monkeypatch)
    assert copied == [("cuda:0", "cuda:1"), ("cuda:0", "cpu")]
    assert found == {("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")}


def test_a_device_is_not_copied_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies_between(["cuda:0", "cuda:0"], monkeypatch) == ([], {("cuda", "cuda")})
    assert copies_between(["cuda:0"], monkeypatch) == ([], set())
