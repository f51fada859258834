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


def test_a_change_reaches_slices_and_their_aliases_once() -> None:
    batch, other = torch.zeros(4), torch.zeros(4)
    parts = [part.data for part in batch.split(1)]
    other_part, alias, other_alias = other.data, torch.zeros(1), torch.zeros(1)
    versions = BatchVersions([batch, other], [parts, [other_part]])
    versions.add_alias(parts[0], alias)
    versions.add_alias(other_part, other_alias)
    batch.add_(1)
    versions.spread()
    versions.spread()
    assert [part._version for part in (*parts, alias)] == [1] * 5
    assert (other_part._version, other_alias._version) == (0, 0)


def test_a_change_of_a_whole_tensor_reaches_its_aliases() -> None:
    whole, alias = torch.zeros(4), torch.zeros(4)
    versions = BatchVersions([whole], [()])
    versions.add_alias(whole.detach(), alias)
    versions.report()
    whole.add_(1)
    versions.spread()
    assert alias._version == 1


def test_what_has_no_counter_or_no_slices_is_left_out() -> None:
    with torch.inference_mode():
        batch = torch.zeros(2)
    versions = BatchVersions([batch, torch.zeros(1)], [batch.split(1), ()])
    versions.report()
    versions.spread()
    versions.forget()
