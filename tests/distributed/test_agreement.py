"""All ranks compare what they were started with."""

import base64
import hashlib
import random
import re
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from pipework.distributed.agreement import agree
from tests.distributed.conftest import HARD

Outcomes = dict[int, BaseException | None]


def all_agree(store: TCPStore, entries: Mapping[int, Any], ranks: int, timeout: float = HARD) -> Outcomes:
    """What comes out on each rank that comes."""
    outcomes: Outcomes = {}

    # Connecting to a store takes seconds now and then, which is no concern of these tests.
    stores = {rank: PrefixStore("call 1", store.clone()) for rank in entries}

    def one(rank: int) -> None:
        try:
            agree(stores[rank], rank, ranks, entries[rank], timeout, "rank {0} (stage {0})".format)
            outcomes[rank] = None
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HARD)
    return outcomes


SAME = {
    "schedule": "1f1b",
    "chunks": 8,
    "layers": ["Linear(4, 8)", "ReLU"],
    "versions": {"torch": "2.13", "pipework": "0.1"},
}


def test_ranks_that_agree(store: TCPStore) -> None:
    assert all_agree(store, dict.fromkeys(range(3), SAME), 3) == {0: None, 1: None, 2: None}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"chunks": 4}, "chunks: 8 on rank 0, 2; 4 on rank 1"),
        ({"layers": ["Linear(4, 8)", "GELU"]}, 'layers, first difference at 1: "ReLU" on rank 0, 2; "GELU" on rank 1'),
        ({"layers": ["Linear(4, 8)"]}, 'layers, first difference at 1: "ReLU" on rank 0, 2; nothing on rank 1'),
        (
            {"versions": {"torch": "2.14", "pipework": "0.1"}},
            'versions, first difference at torch: "2.13" on rank 0, 2; "2.14" on rank 1',
        ),
        ({"more": None}, "more: nothing on rank 0, 2; null on rank 1"),
        ({"schedule": ["1f1b"]}, 'schedule: "1f1b" on rank 0, 2; ["1f1b"] on rank 1'),
    ],
)
@pytest.mark.thorough
def test_differences_are_shown_on_every_rank(store: TCPStore, changed: dict[str, Any], line: str) -> None:
    begun = time.monotonic()
    outcomes = all_agree(store, {0: SAME, 1: {**SAME, **changed}, 2: SAME}, 3)
    assert time.monotonic() - begun < HARD / 2
    assert set(outcomes) == {0, 1, 2}
    for error in outcomes.values():
        assert type(error) is ValueError
        assert str(error) == (f"the ranks were started with different settings, and must have the same:\n  {line}")


def test_of_long_values_the_difference_is_shown(store: TCPStore) -> None:
    long = "x" * 5000
    outcomes = all_agree(store, {0: {"order": long + "F" + long}, 1: {"order": long + "B" + long}}, 2)
    text = str(outcomes[0])
    assert len(text) < 700
    assert "xxxFxxx" in text
    assert "xxxBxxx" in text


MANY = {f"layer.{n}": f"float32 ({n},)" for n in range(3000)}
KEYS = sorted(MANY)
LIST = [f"layer {n}" for n in range(3000)]


@pytest.mark.parametrize(
    ("left", "right", "line"),
    [
        (
            MANY,
            {**MANY, "layer.77": "x"},
            ', first difference at layer.77: "float32 (77,)" on rank 0, 2; "x" on rank 1',
        ),
        (MANY, {**MANY, KEYS[-1]: 1, "layer.9": 2}, ', first difference at layer.9: "float32 (9,)" on rank 0, 2; 2 on'),
        (MANY, {**MANY, "layer.1b": 1}, ", first difference at layer.1b: nothing on rank 0, 2; 1 on rank 1"),
        (
            MANY,
            {k: MANY[k] for k in KEYS[1:]},
            ', first difference at layer.0: "float32 (0,)" on rank 0, 2; nothing on',
        ),
        (
            MANY,
            {k: MANY[k] for k in KEYS[:9]},
            f', first difference at {KEYS[9]}: "{MANY[KEYS[9]]}" on rank 0, 2; nothing',
        ),
        (LIST, [*LIST[:2999], "x"], ', first difference at 2999: "layer 2999" on rank 0, 2; "x" on rank 1'),
        (LIST, [*LIST, 5], ", first difference at 3000: nothing on rank 0, 2; 5 on rank 1"),
        (LIST[:256], LIST[:512], ', first difference at 256: nothing on rank 0, 2; "layer 256" on rank 1'),
        (LIST, [], ', first difference at 0: "layer 0" on rank 0, 2; nothing on rank 1'),
        (LIST, MANY, ': ["layer 0", "layer 1"'),
        (LIST, 5, ': ["layer 0", "layer 1"'),
        (
            [{"a": LIST}, *LIST],
            [{"a": LIST[1:]}, *LIST],
            ', first difference at 0.a.0: "layer 0" on rank 0, 2; "layer 1"',
        ),
    ],
    ids=lambda value: "" if isinstance(value, (list, dict, int)) else value[:40],
)
@pytest.mark.thorough
def test_of_long_lists_and_dicts_the_first_difference_is_shown(
    store: TCPStore, left: Any, right: Any, line: str
) -> None:
    for one, two in ((left, right), (right, left)):
        prefix = PrefixStore(str(one is left), store)
        outcomes = all_agree(prefix, {0: {"key": one}, 1: {"key": two}, 2: {"key": one}}, 3)
        for error in outcomes.values():
            assert type(error) is ValueError
            text = str(error).split("the same:\n  ")[1]
            assert len(text) < 500
            if one is left:
                assert text.startswith(f"key{line}")


def test_ranks_that_agree_exchange_one_digest(store: TCPStore) -> None:
    parameters = {f"layer.{n}.weight": "torch.float32 (1024, 1024)" for n in range(100_000)}
    entries = {"parameters": parameters, "weights": "x" * 5_000_000}
    assert all_agree(store, dict.fromkeys(range(2), entries), 2) == {0: None, 1: None}
    assert len(store.get("call 1/digest/0")) == 64
    assert store.num_keys() == 2


def test_of_huge_contracts_the_difference_is_shown(store: TCPStore) -> None:
    many = {f"layer.{n}.weight": "torch.float32 (1024, 1024)" for n in range(20_000)}
    outcomes = all_agree(store, {0: {"parameters": many}, 1: {"parameters": {**many, "layer.5.weight": 1}}}, 2)
    line = 'parameters, first difference at layer.5.weight: "torch.float32 (1024, 1024)" on rank 0; 1 on rank 1'
    for error in outcomes.values():
        assert str(error).endswith(line)
    digest = store.get("call 1/digest/0").decode()
    assert len(store.get(f"call 1/contract/{digest}")) < 200_000  # of 960,000


def test_a_contract_that_is_too_long_to_be_sent_is_named_as_different(store: TCPStore) -> None:
    noise = random.Random(0).randbytes(3_000_000).hex()  # cannot be compressed into what the store takes
    outcomes = all_agree(store, {0: {"key": noise}, 1: {"key": 5}}, 2)
    assert re.search(r"the same:\n  key: \"[0-9a-f]*\.\.\. on rank 0; 5 on rank 1$", str(outcomes[0]))
    assert str(outcomes[1]).endswith("the same:\n  something else, which could not be read, on rank 0")


def test_many_different_contracts_are_compared_up_to_a_bound(store: TCPStore) -> None:
    outcomes = all_agree(store, {rank: {"key": rank} for rank in range(20)}, 20)
    for rank, error in outcomes.items():
        text = str(error)
        assert "0 on rank 0; 1 on rank 1;" in text
        assert f"{rank} on rank {rank}" in text
        assert "something else, which could not be read, on rank 1" in text


def published(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


@pytest.mark.parametrize("text", ["5", "[" * 100_000, "{", "", '{"key": 5}'])
@pytest.mark.thorough
def test_a_contract_that_cannot_be_read_is_named_as_different(store: TCPStore, text: str) -> None:
    text_digest = hashlib.sha256(text.encode()).hexdigest()
    content = published(text if text != '{"key": 5}' else '{"key": 6}')  # whose digest is another one
    other = PrefixStore("call 1", store.clone())
    outcomes: Outcomes = {}
    thread = threading.Thread(target=lambda: outcomes.update(all_agree(store, {0: {"key": LIST}}, 2)))
    thread.start()
    while not other.check(["digest/0"]):
        time.sleep(0.01)
    other.set(f"contract/{text_digest}", content)
    other.set("digest/1", text_digest)
    thread.join(HARD)
    assert str(outcomes[0]).endswith("the same:\n  something else, which could not be read, on rank 1")


def test_who_does_not_come_is_named(store: TCPStore) -> None:
    outcomes = all_agree(store, {0: SAME, 2: SAME}, 3, timeout=1)
    for error in outcomes.values():
        assert type(error) is TimeoutError
        assert re.search(r"rank 1 \(stage 1\) did not come within \d+ s; 2 of 3 ranks are there", str(error))


def test_a_difference_does_not_wait_for_who_does_not_come(store: TCPStore) -> None:
    begun = time.monotonic()
    outcomes = all_agree(store, {0: SAME, 2: {}}, 3, timeout=10 * HARD)
    assert time.monotonic() - begun < HARD
    for error in outcomes.values():
        assert type(error) is ValueError
        assert "chunks: 8 on rank 0; nothing on rank 2" in str(error)
        assert "(rank 1 (stage 1) did not come within" in str(error)


def test_garbage_is_not_taken_for_a_rank(store: TCPStore) -> None:
    other = PrefixStore("call 1", store)
    garbage = (b"\x80\x04cos\nsystem", b"[1]", b"[" * 100_000, b"x" * 64, b"a" * 65, b"")
    ranks = range(len(garbage))
    for rank, each in zip(ranks, garbage, strict=True):
        other.set(f"digest/{rank}", each)
    assert all_agree(store, dict.fromkeys(ranks, SAME), len(ranks)) == dict.fromkeys(ranks)


def test_who_is_overwritten_before_the_others_come_writes_again(store: TCPStore) -> None:
    other = PrefixStore("call 1", store.clone())
    early = threading.Thread(target=agree, args=(PrefixStore("call 1", store.clone()), 0, 2, SAME, HARD))
    early.start()
    while not other.check(["digest/0"]):
        time.sleep(0.01)
    other.set("digest/0", "garbage")
    agree(other, 1, 2, SAME, HARD)
    early.join(HARD)
    assert not early.is_alive()


def test_errors_before_work(store: TCPStore) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        agree(store, 0, 2, {"lock": threading.Lock()}, 1)
