import json
import math
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipework.values.json_codec import JsonCodec

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(categories=None))
keys = st.integers() | st.text() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.tuples(st.integers())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "items", "name", "value"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value):
    return JsonCodec().decode(json.loads(json.dumps(JsonCodec().encode(value, "x"), allow_nan=False)))


def same(left, right):
    """Also of the same types, so that True is not 1."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(map(same, left, right)) and all(map(same, left.values(), right.values()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(values)
def test_anything_comes_back(value):
    assert same(there_and_back(value), value)


def test_what_json_has_not():
    value = {"a": (math.inf, -math.inf), "b": Counter({3: 2}), "c": {1, 2}, "d": OrderedDict(z=1, a=2)}
    back = there_and_back({**value, "e": torch.Size([2])})
    assert back == {**value, "e": (2,)}
    assert [type(each) for each in back.values()] == [tuple, Counter, set, OrderedDict, tuple]
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([np.float64(0.1), np.int64(3), np.float32(0.5)]) == [0.1, 3, 0.5]


def test_tensors_are_put_aside():
    tensors = {}

    def put(name, tensor):
        tensors[f"<{name}>"] = tensor
        return f"<{name}>"

    value = {"a/b": torch.ones(2), "a": {"c": torch.zeros(2)}, "list": [torch.tensor(3)]}
    form = JsonCodec(put=put).encode(value, "x")
    assert list(tensors) == ["<x/a/b>", "<x/a/c>", "<x/list/0>"]
    back = JsonCodec(get=tensors.__getitem__).decode(form)
    assert back["a/b"] is value["a/b"]
    assert back["a"]["c"] is value["a"]["c"]


Pair = namedtuple("Pair", "a b")


class Own(dict):
    pass


@pytest.mark.parametrize("value", [object(), Pair(1, 2), b"bytes", 1j, lambda: 0, np.ones(2), Own()])
def test_anything_else_is_refused_and_named(value):
    with pytest.raises(TypeError, match=r"^scheduler/a/1 is a .*, which a checkpoint cannot hold: wanted None"):
        JsonCodec().encode({"a": [1, value]}, "scheduler")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "os.system", "items": []},
        {"$": "tuple", "items": 5},
        {"$": 1},
        {"$": "tensor", "name": "x"},
        {"$": "bytes", "value": ""},
        {"$": "class"},
    ],
)
def test_unknown_kinds_are_refused(value):
    with pytest.raises(ValueError, match="unknown kind"):
        JsonCodec().decode(value)


@pytest.mark.parametrize(
    "form",
    [
        {"$": "dict", "items": [5]}, {"$": "dict", "items": [[[], 2]]}, {"$": "float", "value": "x"},
        {"$": "int", "value": "x"}, {"$": "str", "value": "!"}, {"$": "Counter", "items": [1]},
        {"$": "set", "items": [[]]},
    ],
)  # fmt: skip
def test_malformed_forms_are_errors(form):
    with pytest.raises((TypeError, ValueError)):
        JsonCodec().decode([form])


def test_integers_that_are_too_long_for_decimal_digits():
    assert there_and_back([-(1 << 20_000), 10**4200]) == [-(1 << 20_000), 10**4200]
