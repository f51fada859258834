import torch

from pipework import torch_private
from pipework.runtime.caller_context import CallerContext


def test_what_a_new_thread_has_anyway_is_usual_and_no_mode() -> None:
    assert CallerContext.capture(["cpu", "meta"]).is_usual
    assert not torch_private.modes()
    with torch.device("meta"):  # a default device is a mode for PyTorch, and a setting here
        assert not torch_private.modes()
        assert not CallerContext.capture(["cpu"]).is_usual


def test_autocast_is_off_in_a_backward_and_on_again_after_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = CallerContext.capture(["cpu"])
        with context.without_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
