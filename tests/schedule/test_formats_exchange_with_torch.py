"""What this library writes, PyTorch's runtime loads; what PyTorch's schedules are, this library loads."""

import pytest
from torch.distributed.pipelining import schedules as peer

from benchmarks.receive_order import theirs
from pipework.schedule import (
    KINDS,
    SCHEDULES,
    Costs,
    Schedule,
    build,
    from_csv,
    simulate,
    to_csv,
    validate,
    with_communication,
    with_gradient_reduction,
)

# With transfers, PyTorch 2.15 wants waits, too, which are not written.
FORMS = ["compute_only", *([] if hasattr(peer, "WAIT_SEND_F") else ["compute_comms"])]
SIZES = [(1, 4), (2, 4), (4, 8), (4, 4), (8, 16)]


def runtime(schedule):
    stages = [theirs.Stage(index, schedule.workers, schedule.stages, 0) for index in schedule.stages_of(0)]
    return peer._PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=theirs.loss_fn)


def comes_to_an_end(loaded, schedule):
    """PyTorch's own simulation, which does not know what is neither computed nor sent."""
    unknown = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
    orders = {
        rank: [action for action in order if action.computation_type.value not in unknown]
        for rank, order in loaded.pipeline_order_with_comms.items()
    }
    assert peer._simulate_comms_compute(orders, lambda stage: schedule.placement[stage], schedule.stages)


def accepts(schedule, form, folder):
    file = folder / f"{schedule.workers}.csv"
    lowered = with_communication(with_gradient_reduction(schedule), channel="worker")
    file.write_text(to_csv(schedule if form == "compute_only" else lowered))
    loaded = runtime(schedule)
    loaded._load_csv(str(file), format=form)
    assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    computing = [
        [str(action) for action in order if action.is_compute_op] for order in loaded.pipeline_order_with_comms.values()
    ]
    assert computing == [[str(action) for action in order] for order in schedule.orders]
    comes_to_an_end(loaded, schedule)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"forward-only"}))  # theirs must have backwards
def test_pytorch_loads_and_accepts_every_schedule(name, form, tmp_path):
    for workers, chunks in [*SIZES, (3, 2), (3, 7)]:
        accepts(build(name, workers=workers, chunks=chunks), form, tmp_path)


@pytest.mark.parametrize("kind", [*theirs.SEVERAL, "ScheduleGPipe"])
def test_pytorchs_schedules_load_here(kind):
    for workers, chunks in SIZES:
        if workers == 1 or (kind == "ScheduleDualPipeV" and chunks < 2 * workers):
            continue
        schedule = from_csv(theirs.compute_only(kind, workers, chunks), name=kind)
        assert validate(schedule).ok
        assert (schedule.workers, schedule.micro_batches) == (workers, chunks)
        own = build(kind, workers=workers, chunks=chunks)
        assert schedule.placement == own.placement
        share = Costs(workers / schedule.stages, 2 * workers / schedule.stages)
        assert simulate(own, share).makespan <= simulate(schedule, share).makespan + 1e-9
        if kind in theirs.SEVERAL:
            lowered = from_csv(theirs.compute_comms(kind, workers, chunks))
            assert lowered.communicates
            assert validate(lowered, channel="pair").ok


def test_what_is_wrong_in_a_list_of_theirs_is_named():
    """Of 1F1B, PyTorch 2.13 lists orders that it does not run: the last rank leaves micro-batch 0 out."""
    schedule = from_csv(theirs.compute_only("Schedule1F1B", 2, 4))
    assert "1F0 is missing in the order of worker 1" in [each.message for each in validate(schedule).violations]


def test_better_than_pytorchs_where_it_is_said_to_be():
    """Of ZB-V for 8 workers and as many micro-batches, theirs waits 22.6% of the time, the one here 12.7%."""
    text = theirs.compute_only("ScheduleZBVZeroBubble", 8, 8)
    share = Costs(0.5, 1)
    bubbles = [simulate(each, share).bubble for each in (from_csv(text), build("zb-v", workers=8, chunks=8))]
    assert [f"{100 * bubble:.1f}" for bubble in bubbles] == ["22.6", "12.7"]


@pytest.mark.parametrize("kind", theirs.SEVERAL)
def test_where_receives_stand_matters_on_one_channel(kind):
    """PyTorch posts receives early, which in one queue per worker holds up sends; here they are posted in time."""
    lowered = from_csv(theirs.compute_comms(kind, 8, 32))
    computing = [[action for action in order if action.kind in KINDS] for order in lowered.orders]
    plain = Schedule("plain", lowered.placement, computing)
    costs = Costs(transfer=0.05).divided(2)
    ideal = simulate(plain, costs).makespan
    assert simulate(lowered, costs, channel="worker").makespan > 1.06 * simulate(lowered, costs).makespan
    for channel in ("pair", "worker"):
        assert simulate(plain, costs, channel=channel).makespan < 1.002 * ideal
