import threading
from inspect import signature

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pipework import Pipe, attach
from pipework.settings import Settings
from tests.helpers import MOVES


def layers(count: int = 4, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def two_stages(**options: object) -> Pipe:
    return Pipe(layers(), chunks=4, balance=[2, 2], devices=["cpu", "cpu"], **options)


# Constructor


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


def with_own(kind: str) -> nn.Sequential:
    """Layers in a module that does more than run them."""
    module = Doubled(*layers()) if kind == "a forward of its own" else layers()
    if kind == "parameters of its own":
        module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    elif kind == "buffers of its own":
        module.register_buffer("scale", torch.ones(1))
    elif kind.startswith("hooks"):
        getattr(module, f"register_{kind.removeprefix('hooks ')}_hook")(lambda *_: None)
    return module


OWN = ["a forward of its own", "parameters of its own", "buffers of its own"]
OWN += ["hooks forward", "hooks forward_pre", "hooks full_backward", "hooks full_backward_pre"]
CHUNKS = "^number of chunks must be positive integer, got "
MODE = r"^checkpoint is not one of 'always', 'except_last', or 'never': got "
SEQUENTIAL = r"^module must be nn\.Sequential to be partitioned, got \w+: write"
FEW = r"^too few devices to hold given partitions \(devices: 1, partitions: 2\): give 2 devices"
DEBUG = "debug is one or several of 'check_finite' and 'one_thread': got "
REFUSED = [
    *[({"chunks": n}, ValueError, rf"{CHUNKS}{n!r}$") for n in (0, -1, 1.5, "4", None, True)],
    *[({"checkpoint": mode}, ValueError, MODE) for mode in ("INVALID", None, True, "")],
    *[({"module": module}, TypeError, SEQUENTIAL) for module in (nn.Linear(1, 1), [nn.Linear(1, 1)], None)],
    *[({"balance": each}, ValueError, "balance") for each in ([1, 2], [4, 1], [0, 4], [-1, 5], [])],
    *[
        ({"module": with_own(kind)}, TypeError, rf"has {kind.split(' f')[0]}, which a pipe of its layers would leave")
        for kind in OWN[1:]
    ],
    ({"module": with_own(OWN[0])}, TypeError, "has a forward of its own, which a pipe of its layers would leave out"),
    ({"balance": [2, 2], "devices": ["cpu"]}, IndexError, FEW),
    ({"debug": ["one_thread", "finite"]}, ValueError, f"{DEBUG}'finite'"),
    ({"debug": None}, ValueError, f"{DEBUG}None"),
    ({"split": "rows"}, TypeError, "split is 'rows': wanted a function that cuts a mini-batch, or None"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_arguments_that_are_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Pipe(**{"module": layers(), "devices": ["cpu"] * 2, **options})


def test_the_arguments_of_a_pipe_are_its_settings() -> None:
    found = signature(Pipe).parameters
    assert {name: each.default for name, each in found.items() if name != "module"} == vars(Settings()) | {"debug": ()}
    assert {*signature(attach).parameters} >= {*found} - {"module", "loss_fn"}


def test_a_sampler_is_of_a_dataset() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"])
    with pytest.raises(TypeError, match=r"got a DataLoader.*wanted the dataset"):
        pipe.sampler(DataLoader(range(4), batch_size=2))


def test_attributes() -> None:
    pipe = two_stages()
    assert (pipe.chunks, pipe.checkpoint, pipe.balance) == (4, "except_last", [2, 2])
    assert pipe.devices == [torch.device("cpu")] * 2
    assert [len(partition) for partition in pipe.partitions] == [2, 2]
    assert pipe.input_device == pipe.output_device == torch.device("cpu")


# As a container


def test_children_may_have_any_name() -> None:
    module = nn.Sequential()
    for name in ("chunks", "devices", "_engine"):
        module.add_module(name, nn.Linear(2, 2))
    pipe = Pipe(module, chunks=2, balance=[1, 2], devices=["cpu"] * 2)
    assert pipe.chunks == 2
    assert list(pipe.state_dict()) == list(module.state_dict())
    pipe(torch.randn(4, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_what_a_pipe_is_made_with_cannot_be_changed() -> None:
    pipe = two_stages()
    for name in (*Settings.names(), "partitions"):
        for value in ("1f1b", nn.ReLU()):
            with pytest.raises(
                AttributeError, match=f"^'{name}' of a pipe cannot be changed: make a new Pipe of the same layers"
            ):
                setattr(pipe, name, value)
    pipe(torch.randn(8, 4)).sum().backward()


def test_forward_may_be_replaced() -> None:
    pipe = two_stages()
    pipe.forward = lambda x: x
    assert pipe(5) == 5


@pytest.mark.parametrize("move", MOVES)
def test_moving_is_refused(move: object) -> None:
    message = (
        r"^denied to move parameters and buffers, because Pipe should manage device placement; leave .* devices= to"
    )
    with pytest.raises(TypeError, match=message):
        move(two_stages())


def test_a_request_to_stop_is_seen() -> None:
    pipe = two_stages()
    assert not pipe.stopping
    pipe.request_stop()
    assert pipe.stopping


def test_training_flags_reach_layers_and_partitions() -> None:
    pipe = two_stages()
    pipe.eval()
    assert not any(layer.training for layer in (*pipe, *pipe.partitions))
    pipe.partitions[1].train()
    assert [layer.training for layer in pipe] == [False, False, True, True]


# Forward


def test_values_that_are_no_tensors() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, factor: int, *, flip: bool = False) -> tuple[torch.Tensor, int]:
            return (-x if flip else x) * factor, len(x)

    pipe = Pipe(nn.Sequential(Scale()), chunks=2, balance=[1])
    output, rows = pipe(torch.ones(5, 2), 3, flip=True)
    assert torch.equal(output, -3 * torch.ones(5, 2))
    assert rows == [3, 2]


# The caller's context


def test_the_callers_context_reaches_every_layer() -> None:
    seen = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            seen.append(
                (y.dtype, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device.type)
            )
            return y

    pipe = Pipe(nn.Sequential(Look(), Look()), chunks=2, checkpoint="always", balance=[1, 1], devices=["cpu"] * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        output = pipe(torch.randn(4, 4, device="cpu"))
    output.float().sum().backward()  # recomputes outside of the caller's autocast, under what was set at the call
    assert len(seen) == 8
    assert set(seen) == {(torch.bfloat16, True, True, "meta")}
    assert pipe[0].linear.weight.grad.dtype == torch.float32


def test_each_worker_has_its_share_of_the_cores() -> None:
    seen = {}

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[threading.current_thread().name] = torch.get_num_threads()
            return x

    torch.set_num_threads(5)
    try:
        Pipe(nn.Sequential(Look(), Look()), balance=[1, 1], devices=["cpu"] * 2)(torch.ones(1))
        assert seen == {"pipework worker 0": 2, "pipework worker 1": 2}
        assert torch.get_num_threads() == 5
        late: list[int] = []
        thread = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert late == [5]
    finally:
        torch.set_num_threads(1)


# Records


def test_record_numbers_mini_batches_as_the_caller_does() -> None:
    pipe = two_stages()
    for _ in range(3):
        pipe(torch.randn(8, 4))
    with pipe.record() as counted:
        pipe(torch.randn(8, 4))
        with pipe.record(step=200) as numbered:
            pipe(torch.randn(8, 4))
            pipe(torch.randn(8, 4))
        pipe(torch.randn(8, 4))
    assert counted.steps == [0, 1]
    assert "step" not in counted.timeline().title
    assert numbered.steps == [200, 201]
    assert numbered.timeline(200).title.endswith(", step 200")
    assert {interval.step for interval in numbered.timeline().intervals} == {201}
    with pytest.raises(ValueError, match="step is -1: wanted an integer of at least 0"), pipe.record(step=-1):
        pass
