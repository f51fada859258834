import copy
import itertools
import pickle

import pytest

from pipework.skip import Namespace


def test_each_is_unique() -> None:
    namespaces = [Namespace() for _ in range(100)]
    assert len(set(namespaces)) == 100


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda namespace: pickle.loads(pickle.dumps(namespace))]
)
def test_a_copy_equals_it(duplicate) -> None:
    namespace = Namespace()
    other = duplicate(namespace)
    assert other == namespace
    assert hash(other) == hash(namespace)
    assert {namespace: "found"}[other] == "found"


def test_they_have_an_order() -> None:
    namespaces = [Namespace() for _ in range(10)]
    ascending = sorted(namespaces)
    assert all(left < right for left, right in itertools.pairwise(ascending))
    first, second = namespaces[:2]
    assert (first < second) != (second < first)
    assert not first < copy.copy(first)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Namespace().identity = "another"
