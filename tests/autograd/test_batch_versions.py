import torch

from pipework.autograd.batch_versions import BatchVersions


def test_only_the_tensor_that_was_changed_is_reported() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    parts = [part.data for part in one.split(2)], [part.data for part in other.split(2)]
    versions = BatchVersions([one, other], parts)
    parts[1][0].add_(1)
    versions.report()
    versions.report()
    assert (one._version, other._version) == (0, 1)
    versions.spread()
    assert [part._version for part in (*parts[0], *parts[1])] == [0, 0, 1, 0]


def test_a_change_reaches_slices_and_aliases_once() -> None:
    batch, alias = torch.zeros(4), torch.zeros(1)
    parts = [part.data for part in batch.split(1)]
    versions = BatchVersions([batch], [parts])
    versions.aliases.append(alias)
    batch.add_(1)
    versions.spread()
    versions.spread()
    assert [part._version for part in (*parts, alias)] == [1] * 5


def test_what_has_no_counter_or_no_slices_is_left_out() -> None:
    with torch.inference_mode():
        batch = torch.zeros(2)
    versions = BatchVersions([batch, torch.zeros(1)], [batch.split(1), ()])
    versions.report()
    versions.spread()
    versions.forget()
