"""What the package exports."""

import pytest

from pipework import testing


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(testing, name).__name__ == name
