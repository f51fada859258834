import contextlib
import dataclasses
import enum
import importlib
import json
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from pipework.distributed.transport import header
from pipework.runtime.skips.stashed import Stashed
from pipework.torch_private import ALIGNMENT
from pipework.values import nested, tensor_form
from pipework.values.shared_memory import together

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Side(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Task(enum.StrEnum):
    TRAIN = "train"


@dataclasses.dataclass(frozen=True)
class Held:
    hidden: torch.Tensor
    steps: list[int]
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Options:
    rate: float
    names: tuple[Any, ...] = ()


@dataclasses.dataclass
class ListWithFields(list):  # type: ignore[type-arg]
    extra: int = 0


class Registered:
    def __init__(self, tensor: Any, names: Any) -> None:
        self.tensor = tensor
        self.names = names


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


pytree.register_pytree_node(
    Registered, lambda node: ([node.tensor], {"names": node.names}), lambda x, about: Registered(*x, about["names"])
)


def sent(value: Any) -> Any:
    tensors, structure = nested.flatten(value)
    description = header.describe(tensors, structure)
    arrived = header.decode(header.encode(description))
    assert arrived == description
    return nested.unflatten(tensors, arrived.around)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, (dict, OrderedDict)):
        return equal([*left.items()], [*right.items()])
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(equal, left, right))
    if dataclasses.is_dataclass(left):
        return all(equal(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left))
    if isinstance(left, int):
        return left == right
    return repr(left) == repr(right)  # nan is nan, 0.0 is not -0.0


tensor = torch.zeros(2, requires_grad=True)
other = torch.ones(3, 4, dtype=torch.int64)

PLAIN = [
    None, True, False, 0, -1, 2**63, -(2**63), -(2**63) - 1, 1 << 20000,
    0.1, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308, complex(-0.0, float("nan")),
    "", "text", "ü\0", "\ud800", "\ud800\udc00", '["float","0x1p0"]', b"", b"\xff\0",
    torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"),
    slice(None), slice(1, (2,), -0.5), range(3), range(0, 4, 2), ...,
    Colour.RED, Level.LOW, Task.TRAIN, Side.LEFT,
    Options(0.1), Options(float("nan"), ("a", torch.Size([2, 3]), OrderedDict(b=deque()))),
]  # fmt: skip


NESTED: list[Any] = [
    tensor, (tensor,), (), [tensor, (other, [])],
    {"b": tensor, "a": other, 1: 5, None: None, (1, "x", (2.5,)): "key", 2.5: 1, b"b": 2, Colour.RED: 3},
    OrderedDict(b=tensor, a=1),
    deque([tensor, 1], maxlen=5), Point(tensor, Point(1, None)), torch.topk(torch.arange(4.0), 2),
    [Held(tensor, [], Held(other, [3], Options(0.5))), 1],
    torch.fx.immutable_collections.immutable_list([tensor, 1]),
    *((tensor, value) for value in PLAIN),
    *([tensor, Options(0.5, (value, [value]))] for value in PLAIN),
]  # fmt: skip


def test_values_survive_exactly() -> None:
    for value in NESTED:
        assert equal(sent(value), value), value
    size = torch.Size([2, 3])  # which comes as it does in one process
    assert equal(sent([tensor, size]), nested.unflatten(*nested.flatten([tensor, size])))


def test_a_tensor_that_occurs_twice_travels_once() -> None:
    first, again = sent([tensor, {"again": tensor}])
    assert first is again["again"] is tensor
    assert len(header.describe(*nested.flatten([tensor, tensor])).forms) == 1


def test_outputs_of_hugging_face_models_and_registered_classes_survive() -> None:
    output, registered = sent(
        [BaseModelOutput(last_hidden_state=tensor, hidden_states=(tensor, other)), Registered(tensor, ("a", 0.5))]
    )
    assert type(output) is BaseModelOutput
    assert (output.last_hidden_state, output.attentions) == (tensor, None)
    assert output.hidden_states[1] is other
    assert (type(registered), registered.tensor, registered.names) == (Registered, tensor, ("a", 0.5))


def test_forms_and_numbers_around_survive() -> None:
    description = header.describe((tensor, None, other), 2**70)
    assert description.forms == (
        tensor_form.TensorForm(torch.float32, (2,), True),
        None,
        tensor_form.TensorForm(torch.int64, (3, 4), False),
    )
    assert header.decode(header.encode(description)) == description
    assert header.decode(header.encode(header.describe((), None))) == header.describe((), None)


def moved(given: Tensor) -> Tensor:
    """What the other process has, after a message with this tensor."""
    (form,) = header.decode(header.encode(header.describe((given,), None))).forms
    assert form == tensor_form.TensorForm.of(given)
    room = form.room()
    return form.tensor(room.copy_(tensor_form.memory_of(given).view(room.shape)))


def aligned_alike(one: Tensor, other: Tensor) -> bool:
    return not one.numel() or (one.data_ptr() - other.data_ptr()) % ALIGNMENT == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=4), st.integers(0, 20))
def test_a_tensor_arrives_with_any_strides(dimensions: list[tuple[int, int]], begin: int) -> None:
    shape, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    whole = torch.arange(200.0).as_strided(shape, strides, begin)
    arrived = moved(whole)
    assert torch.equal(arrived, whole)
    assert aligned_alike(arrived, whole)
    assert not whole.numel() or arrived.stride() == whole.stride()
    assert not arrived._is_view()


@pytest.mark.parametrize(
    ("view", "sent"),
    [
        (torch.arange(12.0).reshape(3, 4)[:, 1:3], 6),  # gaps
        (torch.arange(3.0).expand(2, 3), 3),  # elements in several places
        (torch.arange(12.0)[::2], 6),
        (torch.arange(6.0).unfold(0, 3, 1), 6),
        (torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last), 120),
        (torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj(), 6),  # the memory says otherwise
        (torch.complex(torch.ones(2, 3), torch.ones(2, 3)).t().conj(), 6),
        (torch.complex(torch.ones(2, 6), torch.ones(2, 6))[:, ::2].conj(), 6),
        (torch.complex(torch.ones(2), torch.ones(2)).conj().imag, 2),
    ],
    ids=lambda view: str(view)[:20],
)
def test_a_view_that_is_not_its_memory_arrives_as_what_it_shows(view: Tensor, sent: int) -> None:
    arrived = moved(view)
    assert torch.equal(arrived, view)
    assert arrived.stride() == view.stride()
    assert tensor_form.memory_of(view).numel() == sent  # no element twice, and no gaps


class Marked(Tensor):
    """An array with something more."""


class MarkedParameter(torch.nn.Parameter):
    """One that PyTorch's operators forget, also in one process."""


def test_a_tensor_that_is_no_array_is_refused_by_name() -> None:
    assert header.describe((torch.ones(2), None), None) == header.describe((torch.zeros(2), None), None)
    marked = torch.ones(2).as_subclass(Marked)
    for odd, words in (
        (torch.eye(2).to_sparse(), r"torch\.sparse_coo"),
        (marked, r"of the class .*\.Marked"),
        (torch.nn.Parameter(marked), r"of the class .*\.Marked"),
        (TwoTensor(torch.ones(2), torch.ones(2)), r"of the class .*\.TwoTensor"),
    ):
        with pytest.raises(TypeError, match=f"{words} cannot be sent"):
            header.describe((odd, None), None)


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.nn.Buffer, MarkedParameter])
def test_a_parameter_arrives_as_a_tensor(kind: Callable[[Tensor], Tensor]) -> None:
    arrived = moved(kind(torch.arange(3.0)))
    assert type(arrived) is Tensor
    assert arrived.tolist() == [0.0, 1.0, 2.0]


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters(categories=None), max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([tensor, other, Colour.GREEN, Level.LOW, torch.float16, ...])
    | st.builds(Options, st.floats())
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2)
keys = scalars | st.tuples(scalars, scalars)
nested_values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(deque)
        | st.builds(Point, inner, inner)
        | st.builds(Held, inner, st.lists(st.integers(), max_size=2), inner)
    ),
    max_leaves=8,
)


@given(nested_values)
def test_any_nesting_survives_exactly(value: Any) -> None:
    assert equal(sent(value), value)


@given(nested_values, nested_values)
def test_descriptions_are_equal_where_their_bytes_are(left: Any, right: Any) -> None:
    one, two = header.describe(*nested.flatten(left)), header.describe(*nested.flatten(right))
    assert (one == two) == (header.encode(one) == header.encode(two))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("a", "b"),
        ([1], (1,)),
        ({1: 0}, {True: 0}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
        (tensor, 1),
        ((tensor, other), (other, tensor)),
        (range(0, 3, 2), range(0, 4, 2)),
        (Options(0.5), Options(1.5)),
        ((tensor, tensor), (tensor, tensor.detach())),
        (np.zeros(2), np.zeros(2)),
        (Odd(), Odd()),
    ],
)
def test_descriptions_of_different_messages_differ(left: Any, right: Any) -> None:
    assert header.describe(*nested.flatten([left])) != header.describe(*nested.flatten([right]))


def test_a_description_equals_itself_whatever_is_in_it() -> None:
    tensors, structure = nested.flatten([tensor, float("nan"), np.zeros(2), Odd(), {float("nan"): Odd()}])
    assert header.describe(tensors, structure) == header.describe(tensors, structure)
    assert header.describe(tensors, structure) != structure


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, {"a": (object(),)}], "a value of type builtins.object is to be sent to another process"),
        (Point(Held(tensor, [1], {1, 2}), 0), "of type builtins.set"),
        (Counter(a=1), "of type collections.Counter"),
        ([np.float64(1.0)], "of type numpy.float64"),
        (defaultdict(int, x=tensor), "of type builtins.type"),
        ([tensor, Side.LEFT | Side.RIGHT], r"a value of type .*Side that is no member of it"),
        ({frozenset(): tensor}, "of type builtins.frozenset"),
        ([ListWithFields()], r"ListWithFields \(object.__new__.* is not safe"),
        ([Options(object())], "of type builtins.object"),  # type: ignore[arg-type]
        (Registered(tensor, {1}), "of type builtins.set"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        header.encode(header.describe(*nested.flatten(value)))


def test_classes_that_no_other_process_could_find_do_not_travel() -> None:
    inner = namedtuple("inner", "x")
    with pytest.raises(TypeError, match=r"the class .*inner, which cannot be found by its name"):
        header.encode(header.describe(*nested.flatten(inner(tensor))))


def test_which_tensors_share_memory_travels() -> None:
    x = torch.arange(6.0)
    carried, parts = together((x[:4].requires_grad_(), None, x[2:].view(torch.int32), torch.ones(1)))
    description = header.describe(carried, None, parts)
    assert header.decode(header.encode(description)) == description
    assert description != header.describe(carried, None)


def test_which_tensors_were_stashed_travels() -> None:
    tensors, structure = nested.flatten((torch.zeros(1), {"a": 5}))
    around = Stashed(structure, ((0, 3),))
    description = header.describe(tensors, around)
    for each in (description, header.describe(tensors, Stashed(structure, ((0, 3),), ((0, 3),)))):
        assert header.decode(header.encode(each)) == each
        assert (description == each) == (each is description)
    for other_around in (structure, Stashed(structure, ((0, 2),))):
        assert description != header.describe(tensors, other_around)


def around(value: Any) -> bytes:
    form = ["torch.float32", [1], False, None, False, 0, None]
    return json.dumps({"forms": [form], "around": {"structure": value}, "parts": []}).encode()


def node(kind: Any, context: Any = None, *items: Any) -> dict[str, Any]:
    return {"$": kind, "context": context, "items": items}


HOSTILE = [
    b"", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"forms":[],"around":true,"parts":[]}',
    b'{"forms":[[]],"around":null,"parts":[]}', b'{"forms":[],"around":null,"parts":[5]}',
    around({"$": 5}), around({"$": "Place", "items": [1]}), around(node("torch:nn")), around(node("builtins:int")),
    around(node("subprocess:Popen", None, "ls")), around(node("os:system", "ls")),
    around({"$": "Enum", "items": ["builtins:int", "real"]}), around(node(f"{__name__}:Held", ["steps"], 0)),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[-60:]))
def test_hostile_bytes_are_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message between processes cannot be read: "):
        header.decode(data)


@pytest.mark.parametrize("name", ["antigravity:Thing", "pipework.cli.no:Thing", "torch:nn.Module.forward", ":", "x"])
def test_an_unknown_class_is_named_and_nothing_is_imported(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"a class '.*' arrives that this process does not know: import the module"):
        header.decode(around(node(name)))
    assert set(sys.modules) == before


class Lazy(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked up")


def test_a_module_is_not_asked_for_what_it_computes_or_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("pipework")
    monkeypatch.delitem(vars(package), "NoChunk", raising=False)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    for name in ("pipework:NoChunk", "lazy:Thing"):
        with pytest.raises(ValueError, match="does not know"):
            header.decode(around(node(name, None, 0)))
    assert "NoChunk" not in vars(package)


def test_a_class_that_is_registered_elsewhere_only_is_named() -> None:
    with pytest.raises(ValueError, match="is not registered with PyTorch's pytree in this process"):
        header.decode(around(node(f"{__name__}:Odd", None, 0)))


@given(nested_values, st.data())
def test_damaged_descriptions_are_read_or_refused(value: Any, data: Any) -> None:
    good = header.encode(header.describe(*nested.flatten(value)))
    draw: Callable[[Any], Any] = data.draw
    at = draw(st.integers(0, len(good) - 1))
    damaged = good[:at] + draw(st.binary(max_size=2)) + good[at + draw(st.integers(0, 2)) :]
    with contextlib.suppress(ValueError):
        header.decode(damaged)
