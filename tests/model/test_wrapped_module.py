"""What is changed in the module of a pipe after the pipe was made."""

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning
from pipework.model.wrapped_module import WrappedModule


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def replaced(each: nn.Sequential) -> None:
    each[2] = nn.Linear(4, 2)


def appended(each: nn.Sequential) -> None:
    each.append(nn.Tanh())


CHANGES: list[tuple[Callable[[nn.Sequential], object], str]] = [
    (replaced, "has other layers now; the pipe, .* keep those that it was made of"),
    (appended, "has other layers now"),
    (lambda each: each.register_forward_hook(lambda *_: None), "has hooks, which are not called, since the pipe"),
    (lambda each: each.register_full_backward_hook(lambda *_: None), "has hooks, which are not called"),
    (lambda each: each.compile(backend="eager"), r"^Sequential\.compile\(\) was called on .*pipe\.compile\(\)$"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # parts of PyTorch that torch.compile imports
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_change_is_warned_of_at_the_next_call_and_once(change: Callable[[nn.Sequential], object], words: str) -> None:
    changed, x = module(), torch.ones(4, 4)
    pipe = Pipe(changed, 2, devices=["cpu", "cpu"])
    expected = pipe(x)
    change(changed)
    with pytest.warns(PipeWarning, match=words) as seen:
        assert torch.equal(pipe(x), expected)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    pipe(x)


def test_what_is_done_to_the_pipe_and_to_layers_is_no_change() -> None:
    plain = module()
    pipe = Pipe(plain, 2, devices=["cpu", "cpu"])
    pipe[2] = nn.Linear(4, 2)
    plain[0].register_forward_hook(lambda *_: None)
    plain.eval().requires_grad_(False)
    assert pipe(torch.ones(4, 4)).shape == (4, 2)


def test_it_keeps_neither_the_module_nor_afterwards_its_layers() -> None:
    plain = module()
    layer = weakref.ref(plain[0])
    wrapped = WrappedModule(plain)
    del plain
    assert wrapped.doubts() == []
    assert layer() is None


def test_a_copy_has_no_module() -> None:
    plain = module()
    wrapped = WrappedModule(plain)
    plain.append(nn.Tanh())
    assert copy.deepcopy(wrapped).doubts() == pickle.loads(pickle.dumps(wrapped)).doubts() == []
    assert len(wrapped.doubts()) == 1
