import threading

import pytest

from pipework.runtime.stage.recompute_phase import checkpointing, is_checkpointing, is_recomputing, recomputing


def phases() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_each_phase_is_seen_inside_and_only_on_its_thread() -> None:
    elsewhere: list[tuple[bool, bool]] = []
    assert phases() == (False, False)
    with checkpointing():
        assert phases() == (True, False)
        thread = threading.Thread(target=lambda: elsewhere.append(phases()))
        thread.start()
        thread.join()
    with recomputing():
        assert phases() == (False, True)
    assert phases() == (False, False)
    assert elsewhere == [(False, False)]


@pytest.mark.parametrize("phase", [checkpointing, recomputing])
def test_an_error_ends_a_phase(phase: object) -> None:
    with pytest.raises(ZeroDivisionError), phase():
        raise ZeroDivisionError
    assert phases() == (False, False)
