"""The links of an engine: made once, and none between stages of one worker."""

import itertools

import pytest
from torch import nn

from pipework import Pipe


def test_a_link_is_made_once_and_none_within_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    monkeypatch.setattr("pipework.runtime.engine.link", lambda source, target: next(made))
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    pipe = Pipe(layers, 2, schedule="interleaved-1f1b", devices=["cpu"] * 3, loss_fn=nn.functional.mse_loss)
    engine = pipe._executor.engine_in_use()
    assert engine.placement == (0, 1, 2, 0, 1, 2)
    assert engine.links.keys() == set(itertools.product(range(3), repeat=2))  # the last one's values go to the first
    assert len(set(engine.links.values())) == next(made)
    del engine.links[2, 1]  # as if no value went there: parameters may be shared later
    assert engine.link(0, 3) is None
    assert engine.link(5, 1) == engine.link(2, 4) == next(made) - 1
