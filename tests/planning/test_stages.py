from dataclasses import replace

import pytest

from pipework.planning.layer_costs import LinkSpeed, SkipBytes
from pipework.planning.stages import StageSums
from tests.planning.made_profiles import made

KINDS = ["device"] * 2


def test_stages_add_up_their_layers() -> None:
    sums = StageSums(made([1.0, 2.0, 4.0], transfer=0.5), 2, optimizer=2.0)
    costs = sums.costs([1, 2], KINDS)
    assert costs.forward == costs.input_gradient == costs.weight_gradient == (2.0, 12.0)
    assert costs.backward == (4.0, 24.0)
    assert costs.transfer == pytest.approx((0.5,), rel=1e-6)
    # For two rows each layer is given 4 bytes, keeps 20 and sends 4.
    assert costs.activation == (24.0, 44.0)
    assert costs.checkpoint_activation == (4.0, 4.0)
    assert costs.waiting == (20.0, 40.0)
    assert costs.message == (4.0,)
    assert sums.fixed_bytes([1, 2]) == [400.0, 800.0]  # weights, gradients, two numbers of the optimizer
    assert sums.temporary_bytes([1, 2]) == [16, 16]
    assert sums.layer_seconds("device", again=0.5) == pytest.approx([7.0, 14.0, 28.0])
    assert sums.activations == [20, 20, 20]


def test_stages_on_other_kinds_take_other_times() -> None:
    sums = StageSums(made([1.0, 1.0], rows=(1,), speeds={"a": 1.0, "b": 0.5}), 1, optimizer=0.0)
    assert sums.costs([1, 1], ["a", "b"]).forward == (1.0, 2.0)


def test_skips_take_time_on_their_way() -> None:
    skips = (SkipBytes(0, 1, (50, 50)), SkipBytes(0, 3, (100, 100)), SkipBytes(0, 3, (20, 20)), SkipBytes(2, 3, (7, 7)))
    slow = replace(made([1.0] * 4), links={("device", "device"): LinkSpeed(0.5, 100.0)})
    sums = StageSums(replace(slow, skips=skips), 1, optimizer=0.0)
    plain = StageSums(slow, 1, optimizer=0.0).costs([1] * 4, ["device"] * 4).transfer
    assert sums.skips_between([1] * 4) == {(0, 1): 50, (0, 3): 120, (2, 3): 7}
    costs = sums.costs([1] * 4, ["device"] * 4)
    assert costs.skip_transfer == (0.5 + 1.2,)
    more = [after - before for before, after in zip(plain, costs.transfer, strict=True)]
    assert more == pytest.approx([0.5, 0.0, 0.07])
    assert sums.skips_between([3, 1]) == {(0, 1): 127}  # the pop of a layer's own stage is no transfer
    assert sums.costs([3, 1], ["device"] * 2).skip_transfer == ()


def test_a_skip_is_held_by_the_stage_that_pops_it() -> None:
    profile = replace(made([1.0] * 4), skips=(SkipBytes(0, 2, (100, 800)),))
    plain, skipping = (StageSums(each, 1, optimizer=0.0) for each in (made([1.0] * 4), profile))
    for balance, popping in (([1, 3], 1), ([2, 1, 1], 1), ([2, 2], 1), ([3, 1], None)):
        before, after = (each.costs(balance, ["device"] * len(balance)) for each in (plain, skipping))
        more = [100.0 * (stage == popping) for stage in range(len(balance))]
        assert [b + m for b, m in zip(before.activation, more, strict=True)] == list(after.activation)
        assert [b + m for b, m in zip(before.checkpoint_activation, more, strict=True)] == list(
            after.checkpoint_activation
        )
