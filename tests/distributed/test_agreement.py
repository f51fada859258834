"""All ranks compare what they were started with: schedule, layers, settings."""

import base64
import hashlib
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from pipework.assignment.assignment import assign
from pipework.distributed.agreement import agree, contract
from pipework.schedule import ScheduleSpec, fill_drain, one_forward_one_backward
from tests.distributed.conftest import HARD

Outcomes = dict[int, BaseException | None]


def all_agree(store: TCPStore, entries: Mapping[int, Any], ranks: int, timeout: float = HARD) -> Outcomes:
    """What comes out on each rank that comes."""
    outcomes: Outcomes = {}

    # Connecting to a store takes seconds now and then, which is no concern of these tests.
    stores = {rank: PrefixStore("call 1", store.clone()) for rank in entries}

    def one(rank: int) -> None:
        try:
            names = [f"rank {each} (stage {each})" for each in range(ranks)]
            agree(stores[rank], rank, names, entries[rank], timeout)
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
        ({"layers": ["Linear(4, 8)", "ReLU", 5]}, "layers, first difference at 2: nothing on rank 0, 2; 5 on rank 1"),
        ({"layers": []}, 'layers, first difference at 0: "Linear(4, 8)" on rank 0, 2; nothing on rank 1'),
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


def test_ranks_that_agree_publish_one_contract(store: TCPStore) -> None:
    parameters = {f"layer.{n}.weight": "torch.float32 (1024, 1024)" for n in range(100_000)}
    entries = {"parameters": parameters, "weights": "x" * 5_000_000}
    assert all_agree(store, dict.fromkeys(range(2), entries), 2) == {0: None, 1: None}
    assert len(store.get("call 1/digest/0")) == 64
    assert store.num_keys() == 3


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


@pytest.mark.parametrize("text", ["5", "[" * 100_000, "{", ""])
@pytest.mark.thorough
def test_a_contract_that_cannot_be_read_is_named_as_different(store: TCPStore, text: str) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()
    other = PrefixStore("call 1", store)
    other.set(f"contract/{digest}", base64.b64encode(zlib.compress(text.encode())).decode())
    other.set("digest/1", digest)
    outcomes = all_agree(store, {0: {"key": 5}}, 2)
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


def test_errors_before_work(store: TCPStore) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        agree(store, 0, ["rank 0", "rank 1"], {"lock": threading.Lock()}, 1)


# ---- what is compared ----------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.BatchNorm1d(2))


def agreed(change: Callable[[nn.Sequential], object], **settings: Any) -> dict[str, Any]:
    module = model()
    change(module)
    return contract(module, assign(module, "gpipe", 1, [2, 2], ["cpu", "cpu"]), **settings)


def tie(module: nn.Sequential) -> None:
    module[2].weight = module[0].weight


def put(name: str, layer: nn.Module) -> Callable[[nn.Sequential], object]:
    return lambda module: setattr(module, name, layer)


@pytest.mark.parametrize(
    ("change", "key", "name", "form"),
    [
        (tie, "parameters", "2.weight", "torch.float32 (2, 2), tied to 0.weight"),
        (lambda module: module[2].half(), "parameters", "2.bias", "torch.float16 (2,)"),
        (put("2", nn.Linear(2, 3)), "parameters", "2.bias", "torch.float32 (3,)"),
        (put("2", nn.Linear(2, 2, bias=False)), "parameters", "2.bias", None),
        (lambda module: module[3].register_buffer("more", torch.ones(1)), "parameters", "3.more", "torch.float32 (1,)"),
    ],
)
def test_what_makes_a_difference(change: Any, key: str, name: str, form: str | None) -> None:
    assert agreed(change) != agreed(lambda module: None)
    assert agreed(change)[key].get(name) == form


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module[0].requires_grad_(False),  # it may be in another process, or thawed after a step
        lambda module: nn.init.zeros_(module[0].weight),
        lambda module: module.eval(),
    ],
)
def test_what_makes_none(change: Any) -> None:
    assert agreed(change) == agreed(lambda module: None)


def test_a_spec_of_ones_own_is_compared_by_its_orders() -> None:
    def of(schedule: Any) -> str:
        module = model()
        return contract(module, assign(module, schedule, 3, [2, 2], ["cpu", "cpu"]), chunks=3)["schedule"]

    assert of(ScheduleSpec(fill_drain)) == of(fill_drain(2, 3))
    assert of(ScheduleSpec(one_forward_one_backward)) == of(one_forward_one_backward(2, 3))
    assert of(ScheduleSpec(fill_drain)) != of(ScheduleSpec(one_forward_one_backward))
