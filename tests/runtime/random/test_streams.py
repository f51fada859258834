import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipework.runtime.random import kernels
from pipework.runtime.random.streams import Key, RandomStream, draw_key, may_draw, mix

words = st.integers(0, 2**64 - 1)
hooked, patched = nn.Linear(1, 1), nn.Linear(1, 1)
hooked.register_forward_hook(lambda *_: None)
patched.forward = lambda x: x


def test_a_key_is_one_draw_from_the_callers_generator_when_it_is_asked_for() -> None:
    torch.manual_seed(0)
    expected, after = draw_key(), torch.rand(1)
    torch.manual_seed(0)
    key, state = Key(), torch.get_rng_state()
    assert not key.drawn
    assert torch.equal(torch.get_rng_state(), state)
    assert key.value() == key.value() == expected
    assert torch.equal(torch.rand(1), after)
    assert draw_key() != expected


def test_a_layer_that_draws_in_evaluation_mode_asks_for_the_key_from_inside_its_stream() -> None:
    kernels.install()
    stream = RandomStream(Key())
    stream.enter(0, 0)
    with kernels.drawing_from(stream):
        assert torch.rand(3).shape == (3,)


@given(words, words, words, words)
def test_mix_is_a_64_bit_number_that_depends_on_all_three(key: int, layer: int, micro_batch: int, other: int) -> None:
    seed = mix(key, layer, micro_batch)
    assert 0 <= seed < 2**64
    if other != micro_batch:
        assert mix(key, layer, other) != seed


def test_neighbouring_places_have_unrelated_seeds() -> None:
    seeds = [mix(0, layer, micro_batch) for layer in range(64) for micro_batch in range(64)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    ones = sum(seed.bit_count() for seed in seeds) / len(seeds)
    assert 31 < ones < 33


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(1, 1), False),
        (nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout(0.1), True),
        (nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1)), True),
        (nn.TransformerEncoderLayer(2, 1), True),
        (nn.RReLU(), True),
        (type("Own", (nn.Linear,), {})(1, 1), True),
        (hooked, True),
        (patched, True),
    ],
)
def test_may_draw(layer: nn.Module, expected: bool) -> None:
    assert may_draw(layer) is expected
