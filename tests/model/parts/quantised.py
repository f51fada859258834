"""Linear layers whose weights are stored as other libraries store them: bytes with a scale, for forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework.torch_private import pytree
from tests.model.parts.models import WIDTH, loss_of

GROUP = 8  # numbers that have a scale together


class QuantState:
    """What belongs to packed bytes; not a tensor itself, as in bitsandbytes."""

    def __init__(self, scales: Tensor, shape: torch.Size) -> None:
        self.scales = scales
        self.shape = shape

    def to(self, device: torch.device) -> None:
        self.scales = self.scales.to(device)


class Packed(nn.Parameter):
    """Two numbers of four bits in a byte; becomes bytes when it is moved for the first time, as `Params4bit` does."""

    def __new__(
        cls, data: Any = None, requires_grad: bool = False, quant_state: Any = None, is_quantised: bool = False
    ) -> Packed:
        data = torch.empty(0) if data is None else data
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.quant_state = quant_state
        made.is_quantised = is_quantised
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """All is done in `__new__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        copied = Packed(self.data.clone(), self.requires_grad, copy.deepcopy(self.quant_state), self.is_quantised)
        memo[id(self)] = copied
        return copied

    def to(self, *arguments: Any, **keywords: Any) -> Packed:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*arguments, **keywords)
        if device is not None and device.type != "meta" and not self.is_quantised:
            return self._quantised(device)
        if self.quant_state is not None and device is not None:
            self.quant_state.to(device)
        moved = super().to(device=device, dtype=dtype, non_blocking=non_blocking)
        return Packed(moved, self.requires_grad, self.quant_state, self.is_quantised)

    def _quantised(self, device: torch.device) -> Packed:
        weight = self.data.to(device).float()
        groups = weight.reshape(-1, GROUP)
        scales = groups.abs().amax(1, keepdim=True) / 7
        codes = ((groups / scales).round() + 8).to(torch.uint8).flatten()
        self.data = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
        self.quant_state = QuantState(scales, weight.shape)
        self.is_quantised = True
        return self


def unpacked(weight: Any) -> Tensor:
    codes = torch.stack([weight.data >> 4, weight.data & 15], -1).flatten().float() - 8
    return (codes.reshape(-1, GROUP) * weight.quant_state.scales).reshape(weight.quant_state.shape)


class _Multiply(torch.autograd.Function):
    """Keeps the bytes, and unpacks them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Packed) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, unpacked(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad @ unpacked(ctx.weight).to(grad.dtype), None


class PackedLinear(nn.Linear):
    """Notes at its first call in which type it computes, and saves its scales beside its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = Packed(self.weight.data)
        if not self.weight.is_meta:
            self.weight = self.weight.to("cpu")
        self.requires_grad_(False)
        self.compute_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.quant_state is None:
            raise AssertionError("the weight has no scales")
        if self.compute_dtype is None:
            self.compute_dtype = x.dtype
        return _Multiply.apply(x.to(self.compute_dtype), self.weight) + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scales"] = self.weight.quant_state.scales

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        scales = state.pop(f"{prefix}weight.scales", None)
        super()._load_from_state_dict(state, prefix, *others)
        if scales is not None:
            self.weight.quant_state.scales.copy_(scales)


class Eight(Tensor):
    """A wrapper around bytes and their scale, which pretends to be a float tensor, as those of torchao."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Eight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: Tensor) -> Eight:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Eight:
        return cls(inner["codes"], inner["scale"])

    def plain(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and isinstance(args[1], Eight):
            x, weight, *bias = args
            return functional.linear(x, weight.plain(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        (name, *_) = func._schema.name.removeprefix("aten::").split(".")
        if name in ("detach", "clone", "alias"):
            return cls(func(args[0].codes, **kwargs), func(args[0].scale, **kwargs))
        if name == "_to_copy":
            return cls(args[0].codes.to(kwargs.get("device")), args[0].scale.to(kwargs.get("device")))
        if name == "equal":
            return torch.equal(args[0].codes, args[1].codes) and torch.equal(args[0].scale, args[1].scale)
        if name == "copy_":
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(f"Eight has no {func}; got {pytree.tree_map(type, args)}")


class EightLinear(nn.Linear):
    """A plain layer with such a weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(Eight.of(self.weight.data), requires_grad=False)
        self.requires_grad_(False)


class Adapted(nn.Module):
    """Two small matrices beside a frozen layer."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class QuantisedBlock(nn.Module):
    def __init__(self, linear: type[nn.Linear], width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.inner = Adapted(linear(width, 2 * width), width, 2 * width)
        self.out = linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.inner(self.norm(x))))


class Quantised(nn.Module):
    """Blocks with packed weights and adapters, between a frozen embedding and a frozen head."""

    def __init__(self, linear: type[nn.Linear], width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, width).requires_grad_(False)
        self.blocks = nn.ModuleList(QuantisedBlock(linear, width) for _ in range(blocks))
        self.head = linear(width, WIDTH)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), labels)


LINEARS: dict[str, type[nn.Linear]] = {"bytes": PackedLinear, "wrapper": EightLinear}
