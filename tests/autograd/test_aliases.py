import contextlib
import threading
from typing import Any

import torch
from torch import nn

from pipework.autograd.aliases import Aliases


def test_a_parameter_that_a_layer_replaces_is_not_put_back() -> None:
    linear = nn.Linear(2, 2)
    with Aliases([linear]).standing_in():
        linear.weight = new = nn.Parameter(torch.zeros(2, 2))
    assert linear.weight is new


def test_of_two_pipes_that_take_a_layer_at_once_one_is_refused() -> None:
    both, ends, refused = threading.Barrier(2), threading.Barrier(2, timeout=20), []

    class Met(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.1)  # where they may, both find the parameter
            return found

    linear = nn.Linear(2, 2, bias=False)
    linear.__dict__["_parameters"] = Met(linear._parameters)

    def run() -> None:
        aliases = Aliases([linear])
        try:
            with aliases.standing_in():
                ends.wait()
        except RuntimeError as error:
            refused.append(str(error))
            ends.wait()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 1
    assert "another pipe is running a layer" in refused[0]
    assert isinstance(linear.weight, nn.Parameter)
