import copy
import operator
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipework import Pipe, PipeWarning
from pipework.model.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from pipework.runtime.stage.execution_views import View, identity
from pipework.runtime.stage.recomputation import in_phase

ORDINARY = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def same_statistics(deferred, ordinary, tolerance=1e-12):
    torch.testing.assert_close(deferred.running_mean, ordinary.running_mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(deferred.running_var, ordinary.running_var, rtol=tolerance, atol=tolerance)
    assert torch.equal(deferred.num_batches_tracked, ordinary.num_batches_tracked)


def statistics(batch_norm):
    return copy.deepcopy([batch_norm.running_mean, batch_norm.running_var, batch_norm.num_batches_tracked])


def unchanged(batch_norm, before):
    return all(torch.equal(left, right) for left, right in zip(statistics(batch_norm), before, strict=True))


def run(batch_norm, batch, sizes):
    """A mini-batch as a pipe runs it."""
    batch_norm.begin_mini_batch()
    outputs = [batch_norm(micro_batch) for micro_batch in batch.split(sizes)]
    batch_norm.commit()
    return torch.cat(outputs)


mini_batches = st.lists(st.sampled_from([0, *range(2, 10)]), min_size=1, max_size=6)


class TestEqualToBatchNormOnTheWholeMiniBatch:
    @settings(max_examples=60, deadline=None)
    @given(
        dimensions=st.integers(0, 3),
        batches=st.lists(mini_batches, min_size=1, max_size=3),
        momentum=st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)),
        channels=st.integers(1, 4),
        offset=st.floats(-100, 100),
        seed=st.integers(0, 1000),
    )
    def test_any_sizes(self, dimensions, batches, momentum, channels, offset, seed):
        generator = torch.Generator().manual_seed(seed)
        ordinary = ORDINARY[dimensions](channels, momentum=momentum, dtype=torch.float64)
        deferred = convert_deferred_batch_norm(copy.deepcopy(ordinary), chunks=1000)
        for sizes in batches:
            shape = (sum(sizes), channels, *(2,) * dimensions)
            batch = torch.randn(shape, generator=generator, dtype=torch.float64) + offset
            ordinary(batch)
            run(deferred, batch, sizes)
            same_statistics(deferred, ordinary)
        before, ones = statistics(deferred), torch.ones(1, channels, *(2,) * dimensions, dtype=torch.float64)
        torch.testing.assert_close(deferred.eval()(ones), ordinary.eval()(ones))
        deferred.commit()
        assert unchanged(deferred, before)

    def test_micro_batches_far_apart(self):
        """The sum of squares minus the square of the sum would keep no digit of this."""
        batch = torch.cat([torch.randn(50, 3) * 1e-3 + offset for offset in (1e3, 1e3, 1e3 + 1)])
        ordinary = nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
        ordinary(batch.double())
        deferred = DeferredBatchNorm(3, momentum=1.0)
        run(deferred, batch, [50, 50, 50])
        torch.testing.assert_close(deferred.running_var.double(), ordinary.running_var, rtol=1e-3, atol=0)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
    def test_half_types(self, dtype, tolerance):
        deferred = DeferredBatchNorm(3, momentum=1.0, dtype=dtype)
        batch = (torch.randn(400, 3) + 30).to(dtype)
        output = run(deferred, batch, 10)
        assert output.dtype == deferred.running_var.dtype == dtype
        torch.testing.assert_close(deferred.running_mean.float(), batch.float().mean(0), rtol=tolerance, atol=0)
        torch.testing.assert_close(deferred.running_var.float(), batch.float().var(0), rtol=tolerance, atol=0)


class TestEachMicroBatch:
    @pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
    @pytest.mark.parametrize("affine", [True, False])
    def test_is_normalised_and_differentiated_as_by_batch_norm(self, dimensions, affine):
        ordinary = ORDINARY[dimensions](3, affine=affine)
        deferred = convert_deferred_batch_norm(copy.deepcopy(ordinary), 3)
        batch = torch.randn(12, 3, *(4,) * dimensions)
        for micro_batch in batch.chunk(3):
            results = []
            for batch_norm in (ordinary, deferred):
                x = micro_batch.clone().requires_grad_()
                output = batch_norm(x)
                results.append([output, *torch.autograd.grad(output.pow(3).sum(), [x, *batch_norm.parameters()])])
            assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))

    def test_the_dimensions_are_checked_as_by_the_class_that_was_replaced(self):
        for dimensions in (1, 2, 3):
            deferred = convert_deferred_batch_norm(ORDINARY[dimensions](2), 2)
            for batch_norm in (deferred.train(), deferred.eval()):
                with pytest.raises(ValueError, match=r"expected .*D input \(got 6D input\)"):
                    batch_norm(torch.zeros(2, 2, 1, 1, 1, 1))
        assert DeferredBatchNorm(2)(torch.randn(2, 2, 1, 1, 1, 1)).shape == (2, 2, 1, 1, 1, 1)
        with pytest.raises(ValueError, match=r"2 dimensions or more, \(N, C, ...\), got shape \(2,\)"):
            DeferredBatchNorm(2)(torch.zeros(2))


class TestCommit:
    def test_comes_once_and_only_from_outside_in_a_mini_batch_of_a_pipe(self):
        deferred = DeferredBatchNorm(3, chunks=2)
        before = statistics(deferred)
        deferred.commit()  # nothing was collected
        deferred.begin_mini_batch()
        for _ in range(5):
            deferred(torch.randn(4, 3))
        assert unchanged(deferred, before)
        for _ in range(2):
            deferred.commit()
            assert deferred.num_batches_tracked == 1
        deferred(torch.randn(4, 3))
        assert deferred.num_batches_tracked == 1
        deferred(torch.randn(4, 3))
        assert deferred.num_batches_tracked == 2  # by itself again

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_a_recomputation_of_a_compiled_one_does_not_count(self):
        deferred = DeferredBatchNorm(3, chunks=100)
        compiled = torch.compile(deferred, backend="eager")
        compiled(torch.randn(4, 3))
        with in_phase("recomputing"):
            compiled(torch.randn(4, 3))
        compiled(torch.randn(4, 3))
        assert len(deferred._collected.moments) == 2


class TestWhatIsCollected:
    def test_is_not_in_the_state_dict_and_that_of_older_libraries_is_left_out(self):
        deferred = DeferredBatchNorm(3, chunks=9)
        deferred(torch.randn(4, 3))
        state = deferred.state_dict()
        assert list(state) == list(nn.BatchNorm1d(3).state_dict())
        old = {"0." + name: tensor + 1 for name, tensor in state.items()}
        old |= {"0.sum": torch.zeros(3), "0.sum_squares": torch.zeros(3)}
        nn.Sequential(deferred).load_state_dict(old)
        assert all(torch.equal(deferred.state_dict()[name], old["0." + name]) for name in state)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.total"):
            nn.Sequential(deferred).load_state_dict(old | {"0.total": torch.zeros(3)})

    @pytest.mark.parametrize(
        "twin_of",
        [copy.deepcopy, lambda old: pickle.loads(pickle.dumps(old)), lambda old: View(old, {identity(old)}).module],
    )
    def test_survives_copies_is_shared_by_stages_and_is_forgotten_after_a_failure(self, twin_of):
        ordinary = nn.BatchNorm2d(3, dtype=torch.float64)
        deferred = convert_deferred_batch_norm(copy.deepcopy(ordinary), 2)
        batch = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
        deferred.begin_mini_batch()
        deferred(batch + 1000)  # of a mini-batch that fails
        deferred.begin_mini_batch()
        deferred(batch[:2])
        twin = twin_of(deferred)
        twin(batch[2:])
        twin.commit()
        ordinary(batch)
        same_statistics(twin, ordinary)


class TestConvert:
    def test_keeps_everything_else(self):
        model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, eps=1e-3, momentum=0.3, dtype=torch.float64))
        ordinary, calls = model[1].eval(), []
        ordinary.note = "mine"
        ordinary.register_forward_hook(lambda *_: calls.append("hook"))
        tensors = [*ordinary.parameters(), *ordinary.buffers()]
        assert convert_deferred_batch_norm(model, 4) is model
        deferred = model[1]
        assert type(deferred) is DeferredBatchNorm
        kept = [getattr(deferred, name) for name in ("eps", "momentum", "num_features", "chunks", "training", "note")]
        assert kept == [1e-3, 0.3, 4, 4, False, "mine"]
        assert all(map(operator.is_, [*deferred.parameters(), *deferred.buffers()], tensors))
        deferred(torch.randn(2, 4, dtype=torch.float64))
        assert calls == ["hook"]

    def test_at_any_depth_and_at_the_top(self):
        shared, deferred = nn.BatchNorm1d(2), DeferredBatchNorm(2, chunks=2)
        blocks = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2), shared, deferred)
        model = nn.ModuleDict({"a": blocks, "b": nn.BatchNorm3d(2), "c": shared})
        blocks.register_module("missing", None)
        convert_deferred_batch_norm(model, 2)
        assert type(blocks[1]) is type(model["b"]) is type(model["c"]) is DeferredBatchNorm
        assert blocks[2] is model["c"]
        assert blocks[3] is deferred
        convert = DeferredBatchNorm.convert_deferred_batch_norm  # as older libraries call it
        assert (type(convert(nn.BatchNorm1d(2), 3)), convert(nn.BatchNorm1d(2)).chunks) == (DeferredBatchNorm, 1)
        assert convert_deferred_batch_norm(relu := nn.ReLU(), 2) is relu

    def test_another_number_of_chunks_converts_again(self):
        model = convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm2d(2)), 2)
        first = model[0]
        first(torch.randn(4, 2, 1, 1))
        second = convert_deferred_batch_norm(model, 3)[0]
        assert (first.chunks, second.chunks, second.weight is first.weight) == (2, 3, True)
        for _ in range(2):
            second(torch.randn(4, 2, 1, 1))
        assert second.num_batches_tracked == 0  # what the first collected is not the second's

    def test_leaves_alone_what_is_no_ordinary_batch_norm(self):
        class Own(nn.BatchNorm1d):
            def forward(self, input):
                return super().forward(input) + 1

        layers = [nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True), nn.LayerNorm(2), Own(2)]
        layers += [nn.BatchNorm1d(2, track_running_stats=False)]
        model = convert_deferred_batch_norm(nn.Sequential(*layers), 2)
        assert all(left is right for left, right in zip(model, layers, strict=True))

    def test_a_lazy_batch_norm_has_to_be_run_first(self):
        with pytest.raises(ValueError, match="LazyBatchNorm1d has no shape yet: run the module once"):
            convert_deferred_batch_norm(nn.LazyBatchNorm1d(), 2)

    def test_chunks_must_be_a_positive_integer(self):
        for chunks in (0, -1, 1.0, True, None, "2"):
            message = rf"^number of chunks must be positive integer, got {chunks!r}$"
            with pytest.raises(ValueError, match=message):
                convert_deferred_batch_norm(nn.BatchNorm1d(2), chunks)
            with pytest.raises(ValueError, match=message):
                DeferredBatchNorm(2, chunks=chunks)


def test_statistics_of_micro_batches_are_told_once_and_not_after_an_answer():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))
    options = {"balance": [2, 1], "devices": ["cpu", "cpu"]}
    told = (
        r"\('1', BatchNorm1d, and 1 more\) normalises with the rows of its micro-batch, and .* "
        "deferred_batch_norm=True takes .* False keeps all"
    )
    with pytest.warns(PipeWarning, match=told) as seen:
        Pipe(module, 4, **options)
    assert [each.filename for each in seen] == [__file__]
    with warnings.catch_warnings(action="error"):
        Pipe(module, 4, deferred_batch_norm=False, **options)
        Pipe(module, 1, balance=[3], devices=["cpu"])
        Pipe(copy.deepcopy(module).eval(), 4, **options)
        Pipe(convert_deferred_batch_norm(copy.deepcopy(module), 4), 4, **options)
        Pipe(module, 4, deferred_batch_norm=True, **options)


def test_a_pipe_that_cannot_be_made_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch_norm = module[1]
    with pytest.raises(ValueError, match="balance"):
        Pipe(module, 2, deferred_batch_norm=True, balance=[9], devices=["cpu"])
    assert type(batch_norm) is nn.BatchNorm1d
    assert module[1] is batch_norm


@pytest.mark.gpu
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16])
def test_on_an_accelerator(input_dtype):
    device = torch.accelerator.current_accelerator()
    ordinary = nn.BatchNorm2d(3, device=device)
    deferred = convert_deferred_batch_norm(copy.deepcopy(ordinary), 4)
    batch = torch.randn(8, 3, 5, 5, device=device).to(input_dtype)
    ordinary(batch)
    for micro_batch in batch.chunk(4):
        deferred(micro_batch)
    same_statistics(deferred, ordinary, tolerance=1e-5)
