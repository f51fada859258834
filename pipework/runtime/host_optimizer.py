"""An optimizer whose state lies in host memory and whose step runs on the CPU, for parameters on accelerators.

Each parameter comes to the host with its gradient, its step runs there, and it goes back. Each way has a stream:

    device to host   | p0 g0 | p1 g1 | p2 g2 |
    CPU                      | step 0 | step 1 | step 2 |
    host to device                    |  p0  |   |  p1  |   |  p2  |

Only the state stays on the host. A copy of the parameters that stayed there, too, would save a third of the copies,
but would be outdated when a checkpoint is loaded or weights are averaged, and the next step would undo the change.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter, defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from pipework import torch_private
from pipework.runtime.early_steps import EarlySteps
from pipework.runtime.host_link import HostLinks, fetched
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pipework.runtime.host_link import Group, Work


class HostOptimizer(Optimizer):
    """Runs an optimizer of PyTorch's on the CPU, with its state in host memory.

    Gradients are read in `step()`: clip them, unscale them and accumulate them as with the optimizer itself. Learning
    rate schedulers, `zero_grad` and state dicts are those of the optimizer itself, so a checkpoint of one fits the
    other. The numbers are those of the optimizer on the CPU, bit for bit; `fused=True` makes AdamW, Adam, SGD and
    Adagrad several times faster there.

    Args:
        params: parameters on any devices, or groups of parameters, as for every optimizer.
        optimizer_class: such as `torch.optim.AdamW`. Its step of a parameter depends on that parameter alone.
        options: arguments of this class.

    Attributes:
        optim: the optimizer that computes.

    Raises:
        TypeError: no class is given; or the step of a parameter depends on other parameters, as in `torch.optim.LBFGS`
            or an optimizer that clips gradients itself; or a parameter is a DTensor.

    Example:
        >>> from torch import nn
        >>> from pipework import HostOptimizer, Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> optimizer = HostOptimizer(pipe.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        >>> pipe(torch.randn(6, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[pipe[0].weight]["exp_avg"].device
        device(type='cpu')
    """

    _early: EarlySteps | None = None
    _stepped: tuple[tuple[Tensor, weakref.ref[Tensor], int], ...] = ()  # by the latest context: gradients, and versions
    _has_hooks = False

    def __init__(self, params: Any, optimizer_class: Any = None, **options: Any) -> None:
        got = params if isinstance(params, Optimizer) else optimizer_class
        if isinstance(got, Optimizer) or not callable(got):
            what = f"an optimizer, {type(got).__name__}(...)" if isinstance(got, Optimizer) else f"{got!r}"
            raise TypeError(
                f"HostOptimizer makes the optimizer itself, and got {what} as optimizer_class: give it parameters, a "
                "class such as torch.optim.AdamW, and options, HostOptimizer(parameters, torch.optim.AdamW, lr=1e-3)"
            )
        self._begin(params, optimizer_class, options)
        for group in self.param_groups:
            _refuse_dependent(optimizer_class, group, options)

    def _begin(self, params: Any, optimizer_class: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        super().__init__(params, {})
        self._links = HostLinks()
        self.optim = optimizer_class([_without_memory(group) for group in self.param_groups], **options)
        self.defaults = self.optim.defaults
        self._take_over()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has."""
        return {**super().__getstate__(), "optim": self.optim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)
        self._links = HostLinks()

    def add_param_group(self, param_group: Group) -> None:
        """See `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        if any(is_dtensor(parameter) for parameter in param_group["params"]):
            del self.param_groups[-1]
            raise TypeError(
                "HostOptimizer copies whole parameters, and got a DTensor, of which this process has a part: give it "
                "parameters of layers that are not sharded, and the others an optimizer of their own"
            )

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`; that of the optimizer itself."""
        if self._early is not None:
            self._early.refuse_inside("optimizer.state_dict() was called")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of an optimizer of this kind, whose parameters may be on any device."""
        if self._early is not None:
            self._early.refuse_inside("optimizer.load_state_dict() was called")
        self.optim.param_groups = [_without_memory(group) for group in self.param_groups]
        self.optim.load_state_dict(state_dict)
        self._take_over()

    def _take_over(self) -> None:
        """Takes options and state of the optimizer inside, which knows stand-ins of the parameters."""
        inside, self.optim.param_groups = self.optim.param_groups, []
        of_stand_in = dict(zip(_parameters(inside), _parameters(self.param_groups), strict=True))
        self.param_groups = [
            {**group, "params": own["params"]} for group, own in zip(inside, self.param_groups, strict=True)
        ]
        self.state = defaultdict(dict, {of_stand_in.get(key, key): each for key, each in self.optim.state.items()})
        self.optim.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step. What is launched afterwards on the current streams sees the new parameters.

        Args:
            closure: computes the loss again; see `torch.optim.Optimizer`.

        Returns:
            What the closure has returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        made = set[int]()
        if self._early is not None:
            self._early.refuse_inside("optimizer.step() was called")
            made = self._early.made
        elif any(
            each.grad is not None and each.grad is used() and torch_private.version(each.grad) == version
            for each, used, version in self._stepped
        ):
            raise RuntimeError(
                "optimizer.step() was called with gradients whose steps step_in_backward(pipe) has made already: leave "
                "step() out after the block, and call zero_grad() before the next mini-batch"
            )
        # In turns from all devices, as many bytes from each, so that every link is busy.
        copied: Counter[torch.device] = Counter()
        in_turns: list[tuple[int, Work]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in made:
                    in_turns.append((copied[parameter.device], (group, parameter, parameter.grad)))
                    copied[parameter.device] += parameter.nbytes
        in_turns.sort(key=itemgetter(0))
        for device in copied:
            self._links[device].begin()
        try:
            self._make([work for _, work in in_turns], made)
        finally:
            for device in copied:
                self._links[device].end()
        return loss

    def register_step_pre_hook(self, hook: Any) -> Any:
        """See `torch.optim.Optimizer`. The hook may change all gradients, so that no step begins early any more."""
        self._has_hooks = True
        return super().register_step_pre_hook(hook)

    @contextlib.contextmanager
    def step_in_backward(self, pipe: Any) -> Iterator[None]:
        """A context around one mini-batch and its backward, in which the step begins: call no `step()` for it.

        The step of a stage's parameters begins as soon as their gradients are complete, on a thread of its own, while
        other stages still compute. All steps are made at the end of the context. The numbers are those of `backward()`
        and `step()`, bit for bit.

        It is wrong to clip gradients by a global norm, to unscale them, or to skip a step because of them: all of that
        needs all gradients before the first step. It is also wrong if anything else changes gradients after the worker
        has computed them: a hook of all optimizers (`register_optimizer_step_pre_hook`), the optimizer itself, in
        place on the CPU, or a wrapper such as `DistributedDataParallel(pipe)`. Between the call and the end do nothing
        with the parameters. After a failure some parameters may have been stepped and others not, so the step cannot
        be made again.

        These steps are made at the end of the context, and nothing is won: of parameters that several stages use, that
        have hooks or had a `.grad` before, or whose gradient is averaged over replicas; those of an optimizer with
        hooks of its own before its step; and all, if steps are captured as graphs, or the pipe is called several times,
        as for gradients that are added up or after a call that failed.

        Args:
            pipe: whose parameters these are; others may be among them.

        Raises:
            TypeError: it is no pipe.
            ValueError: it has a gradient scaler, or parameters, and none of this optimizer.
            RuntimeError: a parameter was stepped early, and then got another gradient, as from a regularisation in the
                loss, or none; the pipe was called again after a step; an option such as the learning rate was changed;
                or `step()` was called inside. This, and an error of the backward or of a step, has a note if parameters
                have been stepped: load the last checkpoint then.

        Example:
            >>> from torch import nn
            >>> from pipework import HostOptimizer, Pipe
            >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
            >>> pipe = Pipe(layers, 4, schedule="1f1b", loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2)
            >>> optimizer = HostOptimizer(pipe.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
            >>> for _ in range(2):
            ...     with optimizer.step_in_backward(pipe):
            ...         pipe(torch.randn(8, 4), target=torch.randn(8, 2)).backward()
            ...     optimizer.zero_grad()
            >>> int(optimizer.state[pipe[0].weight]["step"])
            2
        """
        executor = getattr(pipe, "_executor", None)
        if executor is None:
            raise TypeError(
                f"step_in_backward got {type(pipe).__name__}, and wanted a Pipe: give it what Pipe returned"
            )
        if executor.settings.grad_scaler is not None:
            raise ValueError(
                "the pipe has a grad_scaler, which decides after the whole backward whether there is a step: call "
                "scaler.scale(loss).backward() and scaler.step(optimizer) without step_in_backward"
            )
        if self._early is not None or executor.early is not None:
            raise RuntimeError(
                "contexts of step_in_backward are one in another: give one HostOptimizer all parameters of a pipe, in "
                "groups, and open one context"
            )
        own = {id(parameter) for parameter in pipe.parameters()}
        if own and not any(id(parameter) in own for parameter in _parameters(self.param_groups)):
            raise ValueError(
                "the optimizer has no parameter of this pipe, which would not be trained: make it for this pipe, "
                "HostOptimizer(pipe.parameters(), ...)"
            )
        groups = [] if self._has_hooks else self.param_groups
        self._early = EarlySteps(self._make, self.step, groups, self._links, executor)
        try:
            options = self._options()
            with self._early.during():
                yield
                if self._options() != options:
                    raise RuntimeError(
                        "an option such as the learning rate was changed inside of step_in_backward(pipe), where some "
                        "steps have the old one: change it after the block"
                    )
            self._stepped = tuple(
                (each, weakref.ref(each.grad), torch_private.version(each.grad))
                for each in _parameters(self.param_groups)
                if each.grad is not None
            )
        finally:
            self._early = None

    def _options(self) -> list[Group]:
        return [{key: each for key, each in group.items() if key != "params"} for group in self.param_groups]

    @torch.no_grad()
    def _make(self, work: list[Work], made: set[int]) -> None:
        """Makes the steps of some parameters, in this order, and adds the ids of those that it has changed."""
        try:
            for (group, parameter, _), link, on_host, arrived in fetched(work, self._links):
                if arrived is not None:
                    arrived.synchronize()
                state = defaultdict(dict, {on_host: self.state[parameter]} if parameter in self.state else {})
                self.optim.param_groups, self.optim.state = [{**group, "params": [on_host]}], state
                made.add(id(parameter))
                self.optim.step()
                if on_host in state:
                    self.state[parameter] = state[on_host]
                link.give_back(on_host, parameter)
        finally:
            self.optim.param_groups, self.optim.state = [], defaultdict(dict)


def _parameters(groups: list[Group]) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _without_memory(group: Group) -> Group:
    """The group with tensors on the CPU in place of the parameters: of the same shapes, without their memory."""
    return {**group, "params": [torch.empty((), dtype=each.dtype).expand(each.shape) for each in group["params"]]}


def _refuse_dependent(optimizer_class: Callable[..., Optimizer], group: Group, options: dict[str, Any]) -> None:
    """Raises a TypeError if some steps on two small parameters together give other numbers than one by one."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    together, alone = ([torch.full((2, 2), value) for value in (1.0, 2.0)] for _ in range(2))
    plain = optimizer_class([{**settings, "params": together}], **options)
    own = HostOptimizer.__new__(HostOptimizer)
    own._begin([{**settings, "params": alone}], optimizer_class, options)
    why = "the step uses a norm, a count or an estimate over several parameters, or random numbers"
    is_same = False
    try:
        for step in range(3):
            for number, parameter in enumerate(together + alone):
                parameter.grad = torch.full((2, 2), 50.0 * (1 + step + number % 2))
            plain.step()
            own.step()
        is_same = all(map(torch.equal, together, alone))
    except TypeError as error:  # such as that of LBFGS, which computes the loss again
        why = str(error)
    if not is_same:
        raise TypeError(
            f"the step of {type(plain).__name__} with these options is another one if it runs parameter by parameter, "
            f"as HostOptimizer runs it: {why}. Take a class and options that treat each parameter on its own, such as "
            "torch.optim.AdamW, and clip gradients before the step"
        )
