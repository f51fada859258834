"""What the package imports, and when."""

import subprocess
import sys

import pytest

from pipework import testing


def test_the_faults_import_no_reference_model() -> None:
    """`pipework.distributed` uses them in every job."""
    code = "import sys, pipework.testing.faults as _; print([n for n in ('pipework.runtime', 'pipework.model', "
    code += "'pipework.testing.reference') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(testing)
    assert getattr(testing, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'pipework\.testing' has no attribute 'Refrence'"):
        _ = testing.Refrence
