"""The local backend. Another kind of workers is `pipework.distributed.backend`."""

import torch

from pipework.backend import Backend, StepCall
from pipework.model.marks import MicroBatches
from pipework.model.mini_batch import split
from pipework.runtime.random.streams import Key


def test_one_process_has_everything() -> None:
    backend = Backend()
    call = StepCall(training=True, grad=True, everywhere=False, returns_output=False, recorded=False, has_target=True)
    agreed = backend.begin(call, split((torch.zeros(5, 1),), {}, 2), (), 1)
    assert agreed == call._replace(rows=5, micro_batches=2)
    agreed = backend.begin(call, split((MicroBatches([torch.zeros(2), torch.zeros(())]),), {}, 2), (), None)
    assert (agreed.micro_batches, agreed.given) == (2, [2, -1])
    key = Key()
    backend.share_key(agreed, key)
    assert not key.drawn
    assert backend.rank_of(1) is None
    assert backend.ranks.all_gather_text("own") == ["own"]


def test_a_request_to_stop_is_seen() -> None:
    backend = Backend()
    assert not backend.stopping
    backend.request_stop()
    assert backend.stopping
