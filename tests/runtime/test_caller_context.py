import torch

from pipework import torch_private
from pipework.runtime.caller_context import CallerContext


def test_what_a_new_thread_has_anyway_is_no_setting_and_no_mode() -> None:
    assert CallerContext.capture(["cpu", "meta"]) == (True, False, (), None, None)
    assert not torch_private.modes()
    with torch.device("meta"):  # a default device is a mode for PyTorch, and a setting here
        assert not torch_private.modes()
        assert CallerContext.capture(["cpu"]).default_device == torch.device("meta")
