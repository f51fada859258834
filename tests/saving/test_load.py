import logging

import pytest
import torch
from torch import nn

from pipework import Pipe, load_checkpoint, save_checkpoint
from tests.saving.harness import OPTIMIZERS, Cut, assert_same, make_pipe, remembered, snapshot, stir


def small(*layers: nn.Module) -> Pipe:
    return Pipe(nn.Sequential(*layers), balance=[len(layers)])


def test_no_complete_checkpoint_is_none(tmp_path, caplog):
    """As a crash just before the mark leaves it: the first save of a run must not stop the next start."""
    pipe = make_pipe()
    assert load_checkpoint(tmp_path / "nowhere", pipe) is None
    for name in ("best", "step-x", "step-00000003.tmp"):
        (tmp_path / name).mkdir()
    assert load_checkpoint(tmp_path, pipe) is None
    (save_checkpoint(tmp_path, pipe, step=1) / "COMPLETE").unlink()
    before = snapshot(pipe)
    assert load_checkpoint(tmp_path, pipe) is None
    assert "step-00000001 is passed over: COMPLETE is missing" in caplog.text
    assert_same(snapshot(pipe), before)


def test_the_newest_is_loaded_and_said(tmp_path, caplog):
    pipe = make_pipe()
    for step in (9, 100_000_000, 99_999_999):
        save_checkpoint(tmp_path, pipe, step=step, data_position=str(step))
    with caplog.at_level(logging.INFO, "pipework"):
        found = load_checkpoint(tmp_path, pipe)
    assert (found.step, found.data_position, found.path) == (10**8, "100000000", tmp_path / "step-100000000")
    assert f"resuming from {found.path}" in caplog.text


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(2, 3), nn.Linear(3, 4)], r"of another shape or dtype: 1.weight \(it has \(2, 3\) float32, the"),
        ([nn.Linear(2, 3), nn.Linear(3, 2).double()], r"1.bias \(it has \(2,\) float32, the pipe \(2,\) float64\)"),
        ([nn.Linear(2, 3)], r"unexpected in the checkpoint: 1.weight, 1.bias. Nothing was changed"),
        ([nn.Linear(2, 3), nn.Linear(3, 2), nn.PReLU()], r"missing in the checkpoint: 2.weight. Nothing"),
        ([nn.Sequential(*(nn.Linear(2, 3) for _ in range(9)))], r"0.0.weight.* and 10 more; unexpected"),
    ],
)
def test_another_model(tmp_path, layers, message):
    """Also if an older checkpoint would fit: this is no damage, and going back would hide it."""
    pipe = small(*layers)
    save_checkpoint(tmp_path, pipe, step=1)
    save_checkpoint(tmp_path, small(nn.Linear(2, 3), nn.Linear(3, 2)), step=2)
    before, draws = snapshot(pipe), torch.get_rng_state()
    with pytest.raises(ValueError, match=f"does not fit the pipe(?s:.)*{message}"):
        load_checkpoint(tmp_path, pipe)
    assert_same(snapshot(pipe), before)
    assert torch.equal(torch.get_rng_state(), draws)


def strange(pipe):
    return torch.optim.Adam([nn.Parameter(torch.ones(3))])


def mostly(pipe):
    return torch.optim.Adam(list(pipe.parameters())[1:])


@pytest.mark.parametrize(
    ("saved", "wanted", "message"),
    [
        (OPTIMIZERS["adam"], OPTIMIZERS["sgd"], "the state of Adam, and the optimizer is SGD: make the same, or load"),
        (OPTIMIZERS["adam"], mostly, "parameters that only the checkpoint's optimizer has: 0.weight. Nothing"),
        (mostly, OPTIMIZERS["adam"], "parameters without any in the checkpoint: 0.weight. Nothing was changed"),
        (None, OPTIMIZERS["adam"], "was saved without an optimizer: leave the optimizer out"),
        (OPTIMIZERS["adam"], strange, r"not the pipe's.*\(3,\) in"),
    ],
)
def test_another_optimizer(tmp_path, saved, wanted, message):
    pipe = make_pipe()
    save_checkpoint(tmp_path, pipe, None if saved is None else saved(pipe), step=1)
    other = make_pipe(Cut(3, "gpipe"))
    optimizer = wanted(other)
    stir(other, optimizer)
    before, state = snapshot(other), remembered(optimizer)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, other, optimizer)
    assert_same(snapshot(other), before)
    assert_same(remembered(optimizer), state)


def test_what_refuses_its_state_leaves_all_as_it_was(tmp_path):
    pipe = make_pipe()
    optimizer = OPTIMIZERS["adam"](pipe)
    stir(pipe, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # The state of a scaler that is not enabled is empty, which one that is enabled refuses.
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(tmp_path, pipe, optimizer, step=1, scheduler=scheduler, scaler=scaler)
    for _ in range(3):
        stir(pipe, optimizer)
        scheduler.step()
    groups, draws = optimizer.param_groups, torch.get_rng_state()
    before, state, schedule = snapshot(pipe), remembered(optimizer), dict(scheduler.state_dict())
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        load_checkpoint(tmp_path, pipe, optimizer, scheduler=scheduler, scaler=torch.amp.GradScaler("cpu"))
    assert_same(snapshot(pipe), before)
    assert_same(remembered(optimizer), state)
    assert optimizer.param_groups is groups
    assert scheduler.state_dict() == schedule
    assert torch.equal(torch.get_rng_state(), draws)
    assert load_checkpoint(tmp_path, pipe, optimizer, scheduler=scheduler, scaler=scaler).step == 1


def test_what_was_not_saved(tmp_path):
    pipe = make_pipe()
    save_checkpoint(tmp_path, pipe, torch.optim.SGD(pipe.parameters(), lr=0.5), step=1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    load_checkpoint(tmp_path, pipe, optimizer)
    assert [optimizer.param_groups[0][key] for key in ("lr", "initial_lr")] == [0.5, 0.1]
    with pytest.raises(ValueError, match="was saved without a scaler: leave scaler= out"):
        load_checkpoint(tmp_path, pipe, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"scheduler must have state_dict.. and load_state_dict.., got a int"):
        load_checkpoint(tmp_path, pipe, scheduler=3)
