import json
import math
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipework.values.packing import pack, unpack

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
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
    tensors = {}
    return unpack(json.loads(json.dumps(pack(value, "x", tensors), allow_nan=False)), tensors.__getitem__)


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
    value = {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}, "list": [torch.tensor(3)]}
    packed = pack(value, "x", tensors)
    assert list(tensors) == ["x/a/b", "x/a/b'", "x/list/0"]
    back = unpack(packed, tensors.__getitem__)
    assert back["a/b"] is value["a/b"]
    assert back["a"]["b"] is value["a"]["b"]


Pair = namedtuple("Pair", "a b")


class Own(dict):
    pass


@pytest.mark.parametrize("value", [object(), Pair(1, 2), b"bytes", 1j, lambda: 0, np.ones(2), Own()])
def test_anything_else_is_refused_and_named(value):
    with pytest.raises(TypeError, match=r"^scheduler/a/1 is a .*, which a checkpoint cannot hold: wanted None"):
        pack({"a": [1, value]}, "scheduler", {})


@pytest.mark.parametrize("value", [{"$": "os.system", "items": []}, {"$": "tuple", "items": 5}, {"$": 1}])
def test_unknown_kinds_are_refused(value):
    with pytest.raises(ValueError, match="unknown kind"):
        unpack(value, {}.__getitem__)
