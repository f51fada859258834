"""The numbers are those of the optimizer on the CPU, bit for bit, and its state dicts fit it."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import device_mesh, tensor
from torch.nn import functional

from pipework import HostOptimizer, Pipe, load_checkpoint, save_checkpoint
from pipework.runtime import host_link
from pipework.runtime.host_link import HostLink
from tests.helpers import assert_same, saved_and_loaded

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01), "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),  # makes its state at once
    (torch.optim.Adafactor, {}),
]
WHERE = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def devices_of(where: str) -> list[torch.device]:
    """Two, different ones if there are."""
    if where == "cpu":
        return [torch.device("cpu")] * 2
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return [torch.device(found.type, number % torch.accelerator.device_count()) for number in range(2)]


def parameters(dtype: torch.dtype = torch.float32, where: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in [(33, 7), (5,), (16, 3, 3, 3), (2, 2)]]
    values[2] = values[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(each.to(device)) for each, device in zip(values, devices_of(where) * 2, strict=True)]


def with_gradients(given: list[nn.Parameter], step: int) -> list[nn.Parameter]:
    """The last parameter has no gradient in the first step."""
    torch.manual_seed(1 + step)
    for parameter in given:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype).to(parameter.device)
    if step == 0:
        given[-1].grad = None
    return given


def groups(of: list[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [{"params": of[:2]}, {"params": of[2:], **options}]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_numbers_are_those_of_the_optimizer_on_the_cpu(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "_AHEAD", 1000)
    there, here = parameters(dtype, where), parameters(dtype)
    host = HostOptimizer(groups(there, lr=0.02), kind, **copy.deepcopy(options))
    plain = kind(groups(here, lr=0.02), **copy.deepcopy(options))
    assert host.defaults == plain.defaults
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (host, plain)]
    for step in range(4):
        for optimizer, own, scheduler in zip((host, plain), (there, here), schedulers, strict=True):
            nn.utils.clip_grad_norm_(with_gradients(own, step), 0.5) if where == "cpu" else with_gradients(own, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step == 1:  # the values change outside of the optimizer, which has kept none of them
            with torch.no_grad():
                for parameter in (*there, *here):
                    parameter.data.mul_(0.5)
        for one, other in zip(there, here, strict=True):
            assert torch.equal(one.cpu(), other)
            assert one.stride() == other.stride()
    assert_same(host.state_dict(), plain.state_dict())
    assert all(each.is_cpu for state in host.state.values() for each in state.values() if torch.is_tensor(each))


@pytest.mark.gpu
def test_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = devices_of("accelerator")
    sizes = [(4, devices[0]), (4, devices[0]), (8, devices[1]), (4, devices[1])]
    own = [nn.Parameter(torch.ones(size, device=device)) for size, device in sizes]
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer, order, fetch = HostOptimizer(own, torch.optim.SGD, lr=0.1), [], HostLink.fetch

    def noted(link: HostLink, parameter: torch.Tensor, gradient: torch.Tensor) -> Any:
        order.append(parameter)
        return fetch(link, parameter, gradient)

    monkeypatch.setattr(HostLink, "fetch", noted)
    optimizer.step()
    if devices[0] != devices[1]:
        assert list(map(id, order)) == [id(own[number]) for number in (0, 2, 1, 3)]


@pytest.mark.parametrize("where", WHERE)
def test_state_dicts_and_copies_fit_the_optimizer(where: str) -> None:
    device = devices_of(where)[0]
    there, here = parameters(where=where), parameters()
    make = partial(HostOptimizer, optimizer_class=torch.optim.AdamW, fused=True)
    host, plain = make(groups(there)), torch.optim.AdamW(groups(here), fused=True, lr=0.5)
    more = nn.Parameter(torch.ones(3, device=device)), nn.Parameter(torch.ones(3))
    for optimizer, own, one in zip((host, plain), (there, here), more, strict=True):
        optimizer.add_param_group({"params": one, "lr": 0.1})
        own.append(one)
        with_gradients(own, 0)
    plain.step()
    host.load_state_dict(plain.state_dict())
    for one, other in zip(there, here, strict=True):
        one.data.copy_(other.data)
    again = make(groups(there[:4]))
    again.add_param_group({"params": more[0]})
    again.load_state_dict(saved_and_loaded(host.state_dict()))
    copied = copy.deepcopy(host)
    for optimizer in (copied, again):
        for one, other in zip(
            here, (each for group in optimizer.param_groups for each in group["params"]), strict=True
        ):
            other.grad = None if one.grad is None else one.grad.to(other.device)
    plain.step()
    again.step()
    copied.step()
    assert_same(again.state_dict(), plain.state_dict())
    assert_same(copied.state_dict(), plain.state_dict())
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.cpu(), other)
    back = torch.optim.AdamW([*groups(there[:4]), {"params": more[0]}], fused=True)
    back.load_state_dict(host.state_dict())
    assert all(state["exp_avg"].device == parameter.device for parameter, state in back.state.items())


def make_pipe(where: str) -> Pipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layers[4].weight = layers[2].weight
    return Pipe(layers, chunks=2, balance=[2, 3], devices=devices_of(where), loss_fn=functional.mse_loss)


def train(pipe: Pipe, optimizer: Any, step: int, scheduler: Any = None, scaler: Any = None) -> None:
    torch.manual_seed(10 + step)
    loss = pipe(torch.randn(4, 6).to(pipe.input_device), target=torch.randn(4, 8).to(pipe.output_device))
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()


def assert_close(pipes: list[Pipe], where: str) -> None:
    for one, other in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if where == "cpu" else 1e-4)  # one steps on the device


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("from_host", [True, False])
def test_a_pipe_goes_on_from_a_checkpoint_with_the_other_kind(where: str, from_host: bool, tmp_path: Any) -> None:
    def made(pipe: Pipe, on_host: bool) -> Any:
        return (partial(HostOptimizer, optimizer_class=torch.optim.AdamW) if on_host else torch.optim.AdamW)(
            pipe.parameters(), lr=0.01, foreach=False
        )

    pipes = [make_pipe(where), make_pipe(where)]
    optimizers = [made(pipe, on_host) for pipe, on_host in zip(pipes, (from_host, not from_host), strict=True)]
    for pipe, optimizer in zip(pipes, optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(3):
            train(pipe, optimizer, step, scheduler)
    assert_close(pipes, where)
    pipes[1] = make_pipe(where)
    optimizers[1] = made(pipes[1], not from_host)
    save_checkpoint(tmp_path, pipes[0], optimizers[0], step=3)
    load_checkpoint(tmp_path, pipes[1], optimizers[1])
    for pipe, optimizer in zip(pipes, optimizers, strict=True):
        train(pipe, optimizer, 3, scaler=torch.amp.GradScaler(str(pipe.output_device.type), init_scale=2.0))
    assert_close(pipes, where)
    assert_same(*(optimizer.state_dict()["param_groups"] for optimizer in optimizers))


def test_a_scaler_skips_a_step_whose_gradients_are_infinite() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = HostOptimizer([parameter], torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e30)
    scaler.scale(1e10 * parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale(), optimizer.state) == ([1, 1, 1], pytest.approx(5e29), {})


def test_a_closure_is_called_with_gradients_enabled() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = HostOptimizer([parameter], torch.optim.SGD, lr=1.0)

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert parameter.tolist() == [-1, -1, -1]


class Clips(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)


class Counts(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.5 * group["lr"]
        super().step(closure)


class Remembers(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = parameter.detach().clone()


@pytest.mark.parametrize("kind", [Clips, Counts, partial(Remembers, momentum=0.9), torch.optim.LBFGS])
def test_a_step_that_depends_on_more_than_its_parameter_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"the step of \w+ with these options is another one if it runs parameter by"):
        HostOptimizer(parameters(), kind, lr=0.1)


def test_what_is_no_class_is_refused() -> None:
    made = torch.optim.SGD(parameters(), lr=0.1)
    for given, got in (
        ((made,), r"an optimizer, SGD\(...\)"),
        ((parameters(), made), "an optimizer, SGD"),
        ((parameters(), "adamw"), "'adamw'"),
        ((parameters(),), "None"),
    ):
        with pytest.raises(TypeError, match=f"got {got}.* as optimizer_class: give .* a class such as torch.optim"):
            HostOptimizer(*given)


def test_a_part_of_a_sharded_parameter_is_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(tensor.distribute_tensor(torch.ones(4), mesh))
        with pytest.raises(TypeError, match="got a DTensor"):
            HostOptimizer([sharded], torch.optim.SGD)
    finally:
        torch.distributed.destroy_process_group()


class ReplacesData(torch.optim.Optimizer):
    """Gives parameters other memory, as optimizers of old did."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize("where", WHERE)
def test_an_optimizer_may_give_parameters_other_memory(where: str) -> None:
    own = nn.Parameter(torch.ones(3, device=devices_of(where)[0]))
    memory = own.data_ptr()
    own.grad = torch.ones_like(own)
    HostOptimizer([own], ReplacesData).step()
    assert torch.equal(own.cpu(), torch.full((3,), 1 - 0.1))
    assert own.data_ptr() == memory
