import torch

from pipework import torch_private
from pipework.runtime.caller_context import CallerContext


def test_what_a_new_thread_has_anyway_is_usual_and_no_mode() -> None:
    assert CallerContext.capture(["cpu", "meta"]).is_usual
    assert not torch_private.modes()
    with torch.device("meta"):  # a default device is a mode for PyTorch, and a setting here
        assert not torch_private.modes()
        assert not CallerContext.capture(["cpu"]).is_usual
