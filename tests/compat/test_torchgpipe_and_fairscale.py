"""torchgpipe's `GPipe` and fairscale's `Pipe` as their users know them; `differential` compares with the originals."""

import copy
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from tests.helpers import saved_and_loaded

CHECKPOINT_MODES = ("never", "except_last", "always")


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class Say(nn.Module):
    """Calls a function with its one argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        (argument,) = arguments
        return self.function(argument)


class Text:
    """Not a string, but it can be made one."""

    def __str__(self) -> str:
        return "always"


# Constructor


def test_without_a_balance_one_is_recommended(adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"^balance is required\n") as caught:
        adapter.Pipe(None, chunks=0)
    package = {"torchgpipe": "torchgpipe", "fairscale": "fairscale.nn.pipe"}[adapter.name]
    assert f"from {package}.balance import balance_by_time" in str(caught.value)


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ([1, 1], "module and sum of balance have different length (module: 3, sum of balance: 2)"),
        ([], "module and sum of balance have different length (module: 3, sum of balance: 0)"),
        ([0, 3], "all balance numbers must be positive integer (balance: [0, 3])"),
        ([-1, 4], "all balance numbers must be positive integer (balance: [-1, 4])"),
    ],
)
def test_a_wrong_balance_is_told_with_a_way_to_a_right_one(adapter: Any, balance: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}\n") as caught:
        adapter.Pipe(layers(), balance, devices=["cpu"])
    assert "balance = balance_by_time(" in str(caught.value)


@pytest.mark.parametrize("balance", [(1, 2), torch.tensor([1, 2]), [1.0, 2.0]], ids=repr)
def test_a_balance_is_any_row_of_whole_numbers(adapter: Any, balance: Any) -> None:
    pipe = adapter.Pipe(layers(), balance, devices=["cpu"] * 2)
    assert pipe.balance == [1, 2]
    assert [type(count) for count in pipe.balance] == [int, int]


@pytest.mark.parametrize("devices", [[], ["cpu"]])
def test_too_few_devices(adapter: Any, devices: list[str]) -> None:
    message = rf"^too few devices to hold given partitions \(devices: {len(devices)}, partitions: 2\)$"
    with pytest.raises(IndexError, match=message):
        adapter.Pipe(layers(), [1, 2], devices=devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices")
def test_devices_are_all_cuda_devices_unless_told(adapter: Any) -> None:
    with pytest.raises(IndexError, match="devices: 0, partitions: 2"):
        adapter.Pipe(layers(), [1, 2])


def test_further_devices_are_dropped(adapter: Any) -> None:
    pipe = adapter.Pipe(layers(), iter((1, 2)), devices=iter(["cpu", torch.device("cpu"), "meta"]))
    assert (pipe.balance, pipe.devices) == ([1, 2], [torch.device("cpu")] * 2)


@pytest.mark.parametrize("chunks", [0, -1, 0.9])
def test_chunks_must_be_positive(adapter: Any, chunks: object) -> None:
    with pytest.raises(ValueError, match=r"^number of chunks must be positive integer$"):
        adapter.pipe(layers(), [3], chunks)


@pytest.mark.parametrize("checkpoint", ["INVALID", "", None])
def test_checkpoint_must_be_one_of_three(adapter: Any, checkpoint: object) -> None:
    with pytest.raises(ValueError, match=r"^checkpoint is not one of 'always', 'except_last', or 'never'$"):
        adapter.pipe(layers(), [3], 1, checkpoint)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), [nn.Linear(1, 1)], None])
def test_module_must_be_sequential(adapter: Any, module: object) -> None:
    with pytest.raises(TypeError, match=r"^module must be nn\.Sequential to be partitioned$"):
        adapter.pipe(module, [1])


def test_a_layer_twice_is_refused(adapter: Any) -> None:
    twice = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^module with duplicate children is not supported$"):
        adapter.pipe(nn.Sequential(twice, nn.ReLU(), twice), [1, 2])


def test_what_is_wrong_is_told_in_the_old_order(adapter: Any) -> None:
    with pytest.raises(ValueError, match="chunks"):
        adapter.pipe(None, [0], 0, "INVALID")
    with pytest.raises(ValueError, match="checkpoint"):
        adapter.pipe(None, [0], 1, "INVALID")
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        adapter.pipe(None, [0])
    with pytest.raises(ValueError, match="sum of balance"):
        adapter.Pipe(layers(), [0], devices=[])
    with pytest.raises(ValueError, match="positive"):
        adapter.Pipe(layers(), [0, 3], devices=[])


def test_arguments_are_converted(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], "4", Text())
    assert [pipe.chunks, pipe.checkpoint] == [4, "always"]
    assert [type(pipe.chunks), type(pipe.checkpoint)] == [int, str]


def test_defaults(adapter: Any) -> None:
    pipe = adapter.Pipe(layers(), [3], devices=["cpu"])
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")


def test_a_pipe_that_cannot_be_made_leaves_the_module_as_it_was(adapter: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
    with pytest.raises(IndexError):
        adapter.Pipe(module, [1, 1], devices=["cpu"], deferred_batch_norm=True)
    assert type(module[0]) is nn.BatchNorm1d


# Container


def test_parameters_are_called_by_partition_and_layer(adapter: Any) -> None:
    module = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), chunks=nn.Linear(2, 1)))
    pipe = adapter.pipe(module, [2, 1])
    assert list(pipe.state_dict()) == [
        "partitions.0.first.weight",
        "partitions.0.first.bias",
        "partitions.0.norm.weight",
        "partitions.0.norm.bias",
        "partitions.0.norm.running_mean",
        "partitions.0.norm.running_var",
        "partitions.0.norm.num_batches_tracked",
        "partitions.1.chunks.weight",
        "partitions.1.chunks.bias",
    ]
    assert [name for name, _ in pipe.named_children()] == ["partitions"]
    assert all(left is right for left, right in zip(pipe.parameters(), module.parameters(), strict=True))


def test_len_index_and_iteration(adapter: Any) -> None:
    module = layers(4)
    pipe = adapter.pipe(module, [1, 2, 1])
    assert len(pipe) == 4
    assert list(pipe) == list(module)
    for index in (0, 1, 2, 3, -1, -2, -3, -4):
        assert pipe[index] is module[index]
    for index in (4, -5):
        with pytest.raises(IndexError):
            pipe[index]


def test_partitions_are_sequences_in_a_list(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2])
    assert type(pipe.partitions) is nn.ModuleList
    assert [type(partition) for partition in pipe.partitions] == [nn.Sequential] * 2
    assert [len(partition) for partition in pipe.partitions] == pipe.balance


def test_moving_is_refused(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2])
    message = f"^denied to move parameters and buffers, because {adapter.Pipe.__name__} should manage device placement$"
    for move in (
        lambda: pipe.cuda(),
        lambda: pipe.cuda(0),
        lambda: pipe.cpu(),
        lambda: pipe.to("cpu"),
        lambda: pipe.to(0),
        lambda: pipe.to(torch.device("cuda")),
        lambda: pipe.to(device="cpu", dtype=torch.float64),
        lambda: pipe.to(torch.zeros(1)),
        lambda: pipe.to(tensor=torch.zeros(1)),
        lambda: pipe.to("cpu", torch.float64),
    ):
        with pytest.raises(TypeError, match=message):
            move()


def test_the_dtype_may_change(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    assert pipe.to(torch.float16).to(dtype=torch.float32).half().double() is pipe
    pipe(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
    before = pipe[0].weight.clone()
    optimizer.step()
    assert not torch.equal(pipe[0].weight, before)


def test_training_flags(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2])
    assert pipe.eval() is pipe
    assert not any(module.training for module in pipe.modules())
    assert pipe.train() is pipe
    assert all(module.training for module in pipe.modules())


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), lambda pipe: saved_and_loaded(pipe)],
    ids=["copied", "pickled", "saved"],
)
def test_copies_are_pipes_of_their_own(adapter: Any, duplicate: Callable[[Any], Any]) -> None:
    original = adapter.pipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), [2, 1], 3, "always")
    x = torch.randn(6, 2)
    original(x).sum().backward()
    twin = duplicate(original)
    for name in ("chunks", "checkpoint", "balance", "devices"):
        assert getattr(twin, name) == getattr(original, name)
    twin.zero_grad()
    original.zero_grad()
    twin(x).sum().backward()
    assert original[0].weight.grad is None
    assert (original[1].num_batches_tracked, twin[1].num_batches_tracked) == (3, 6)
    original(x).sum().backward()
    assert torch.equal(original[0].weight.grad, twin[0].weight.grad)
    twin.chunks = 2
    assert original.chunks == 3


def test_an_empty_pipe_returns_its_input(adapter: Any) -> None:
    pipe = adapter.Pipe(nn.Sequential(), [], devices=["cpu"])
    x = torch.zeros(2)
    assert pipe(x) is x
    assert (len(pipe), pipe.balance, pipe.devices, list(pipe)) == (0, [], [], [])
    with pytest.raises(TypeError, match=r"^expected Tensor, but got int$"):
        pipe(3)


# Forward


def test_a_tuple_reaches_a_layer_as_one_argument(adapter: Any) -> None:
    seen = []
    split = Say(lambda x: (x, 2 * x))
    swap = Say(lambda pair: (seen.append(type(pair)), (pair[1], pair[0]))[1])
    pipe = adapter.pipe(nn.Sequential(split, swap, Say(lambda pair: pair)), [1, 1, 1], 2)
    doubled, x = pipe(torch.ones(4, 2))
    assert seen == [tuple, tuple]
    assert torch.equal(doubled, 2 * x)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_tuple_of_inputs(adapter: Any, checkpoint: str) -> None:
    pipe = adapter.pipe(nn.Sequential(Say(lambda pair: pair[0] * pair[1]), nn.Linear(2, 2)), [1, 1], 2, checkpoint)
    a, b = torch.randn(2, 4, 2).requires_grad_()
    inputs = [tensor.detach().requires_grad_() for tensor in (a, b)]
    output = pipe(tuple(inputs))
    output.sum().backward()
    gradients = torch.autograd.grad(pipe[1](a * b).sum(), (a, b))
    for tensor, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("a", "str"), (None, "NoneType"), ([torch.zeros(1)], "list"), ((torch.zeros(1), 1), "int"), (((), {}), "dict")],
)
def test_inputs_are_a_tensor_or_a_tuple_of_tensors(adapter: Any, value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^expected Tensor, but got {kind}$"):
        adapter.pipe(layers(), [3])(value)


def test_one_input_by_position_or_by_name(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2])
    x = torch.ones(2, 2)
    assert torch.equal(pipe(input=x), pipe(x))
    with pytest.raises(TypeError):
        pipe(x, x)
    with pytest.raises(TypeError):
        pipe()


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(9, 8, [2, 2, 2, 2, 1]), (9, 4, [3, 3, 3]), (10, 4, [3, 3, 3, 1]), (3, 8, [1, 1, 1]), (1, 4, [1]), (8, 1, [8])],
)
def test_mini_batches_are_split_as_torch_chunk_does(adapter: Any, rows: int, chunks: int, sizes: list[int]) -> None:
    seen: list[int] = []
    pipe = adapter.pipe(nn.Sequential(Say(lambda x: (seen.append(len(x)), x)[1])), [1], chunks)
    assert torch.equal(pipe(torch.arange(rows)), torch.arange(rows))
    assert seen == sizes


def test_tensors_with_other_numbers_of_pieces_are_refused(adapter: Any) -> None:
    pipe = adapter.pipe(nn.Sequential(Say(lambda pair: pair[0])), [1], 4)
    with pytest.raises(RuntimeError, match=r"^Found different number of chunks produced for inputs: 3 and 4$"):
        pipe((torch.zeros(9), torch.zeros(8)))


def test_settings_can_be_changed_later(adapter: Any) -> None:
    seen: list[tuple[int, bool]] = []
    is_recomputing = adapter.module().is_recomputing
    see = Say(lambda x: (seen.append((len(x), is_recomputing())), x * 1)[1])
    pipe = adapter.pipe(nn.Sequential(nn.Linear(1, 1), see), [1, 1], 1, "never")
    for chunks, checkpoint in ((1, "never"), (4, "never"), (2, "always"), (2, "except_last")):
        pipe.chunks, pipe.checkpoint = chunks, checkpoint
        assert (pipe.chunks, pipe.checkpoint) == (chunks, checkpoint)
        seen.clear()
        pipe(torch.ones(4, 1)).sum().backward()
        recomputed = {"never": 0, "except_last": chunks - 1, "always": chunks}[checkpoint]
        assert sorted(seen) == sorted([(4 // chunks, False)] * chunks + [(4 // chunks, True)] * recomputed)
    with pytest.raises(ValueError, match="chunks"):
        pipe.chunks = 0
    with pytest.raises(ValueError, match="checkpoint"):
        pipe.checkpoint = "sometimes"
    assert (pipe.chunks, pipe.checkpoint) == (2, "except_last")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_layers_know_whether_they_are_recomputed(adapter: Any, checkpoint: str) -> None:
    package = adapter.module()
    seen: list[tuple[bool, bool]] = []
    see = Say(lambda x: (seen.append((package.is_checkpointing(), package.is_recomputing())), x * 1)[1])
    pipe = adapter.pipe(nn.Sequential(see), [1], 3, checkpoint)
    pipe(torch.ones(3, 1, requires_grad=True)).sum().backward()
    checkpointed = {"never": 0, "except_last": 2, "always": 3}[checkpoint]
    assert seen.count((True, False)) == seen.count((False, True)) == checkpointed
    assert seen.count((False, False)) == 3 - checkpointed
    seen.clear()
    pipe.eval()(torch.ones(3, 1, requires_grad=True)).sum().backward()
    assert seen == [(False, False)] * 3
    assert (package.is_checkpointing(), package.is_recomputing()) == (False, False)


def test_a_single_micro_batch_is_the_callers_own(adapter: Any) -> None:
    """The un-partitioned `nn.Identity` returns its input; the old libraries concatenated even a single output."""
    for chunks, rows in ((1, 3), (4, 1)):
        x = torch.ones(rows, 2)
        pipe = adapter.pipe(nn.Sequential(nn.Identity(), Say(lambda x: (x, x.sum(), x.t()))), [1, 1], chunks)
        for output in pipe(x):
            output.add_(1).view(-1)
        assert torch.equal(x, torch.ones(rows, 2))
    tanh = adapter.pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1])
    tanh(x).mul_(2).sum().backward()


# Batch norm


def test_deferred_batch_norm(adapter: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2).eval())
    whole = copy.deepcopy(module).double()
    pipe = adapter.pipe(module, [2, 1], 4, "always", deferred_batch_norm=True).double()
    deferred = adapter.module("batchnorm").DeferredBatchNorm
    assert [type(batch_norm) for batch_norm in (pipe[0], pipe[1][0], pipe[2])] == [deferred] * 3
    assert [pipe[0].chunks, pipe[0].training, pipe[2].training] == [4, True, False]
    x = torch.randn(6, 2, dtype=torch.float64)  # three micro-batches
    pipe(x).sum().backward()
    whole[0](x)
    for name, expected in whole[0].named_buffers():
        torch.testing.assert_close(pipe[0].get_buffer(name), expected, rtol=1e-12, atol=1e-14)


# Errors, and what is left behind


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_the_layers_own_exception_comes_out(adapter: Any, error: BaseException, checkpoint: str) -> None:
    fails = True

    def fail(x: Tensor) -> Tensor:
        if fails:
            raise error
        return x

    pipe = adapter.pipe(nn.Sequential(nn.Linear(2, 2), Say(fail), nn.Linear(2, 2)), [1, 1, 1], 2, checkpoint)
    with pytest.raises(type(error)) as caught:
        pipe(torch.ones(4, 2))
    assert caught.value is error
    fails = False
    assert pipe(torch.ones(4, 2)).shape == (4, 2)


def test_no_thread_is_left_behind(adapter: Any, own_workers: Callable[[], list[threading.Thread]]) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    pipe(torch.ones(4, 2)).sum().backward()
    workers = own_workers()
    assert len(workers) == 2
    del pipe
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


# Replaced layers


def test_a_layer_can_be_replaced(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    pipe(torch.ones(4, 2))
    pipe.partitions[1][0] = nn.Tanh()
    assert pipe[1] is pipe.partitions[1][0]
    expected = pipe[2](torch.tanh(pipe[0](torch.ones(4, 2))))
    torch.testing.assert_close(pipe(torch.ones(4, 2)), expected)
    pipe.partitions[1].add_module("more", nn.Tanh())
    with pytest.raises(ValueError, match="made with 3 layers, and its partitions have 4 now"):
        pipe(torch.ones(4, 2))


def test_it_is_a_pipe_inside(adapter: Any) -> None:
    """Gradients are those of `pipework.Pipe`, where both split alike; two of them have the same sum in either order."""
    module = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    native = Pipe(copy.deepcopy(module), 2, balance=[2, 2], devices=["cpu"] * 2)
    pipe = adapter.pipe(module, [2, 2], 2, "except_last")
    x = torch.randn(8, 2)
    for each in (native, pipe):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    for mine, expected in zip(pipe.parameters(), native.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


@pytest.mark.gpu
def test_on_an_accelerator(adapter: Any) -> None:
    device = torch.accelerator.current_accelerator()
    plain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(device)
    pipe = adapter.Pipe(copy.deepcopy(plain).cpu(), [1, 2], devices=[device, device], chunks=2, checkpoint="always")
    assert [parameter.device.type for parameter in pipe.parameters()] == [device.type] * 4
    x = torch.randn(4, 2, device=device)
    plain(x).square().sum().backward()
    pipe(x).square().sum().backward()
    for mine, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
