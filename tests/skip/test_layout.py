import dataclasses

import pytest
from torch import nn

from pipework.model.sequential import WithDevice
from pipework.skip import Namespace, skippable
from pipework.skip.layout import SkipEdge, named_skippables, skip_edges


class Layer(nn.Module):
    pass


def stashing(*names):
    return skippable(stash=names)(Layer)()


def popping(*names):
    return skippable(pop=names)(Layer)()


def test_no_skips():
    assert skip_edges([]) == ()
    assert skip_edges([[nn.ReLU()], []]) == ()


def test_from_stage_to_stage():
    assert skip_edges([[stashing("a")], [nn.ReLU()], [popping("a")]]) == (SkipEdge((None, "a"), 0, (2,)),)


def test_inside_a_stage():
    assert skip_edges([[nn.ReLU()], [stashing("a"), popping("a")]]) == (SkipEdge((None, "a"), 1, (1,)),)


def test_several_destinations_ascend_without_repeats():
    stages = [[stashing("a"), popping("a")], [], [popping("a"), nn.ReLU(), popping("a")], [popping("a")]]
    assert skip_edges(stages) == (SkipEdge((None, "a"), 0, (0, 2, 3)),)


def test_edges_come_in_the_order_of_stashing():
    stages = [[stashing("b", "a")], [stashing("c")], [popping("a", "b", "c")]]
    assert [edge.key[1] for edge in skip_edges(stages)] == ["b", "a", "c"]


def test_namespaces_count():
    first, second = Namespace(), Namespace()
    stages = [
        [stashing("a").isolate(first)],
        [stashing("a").isolate(second)],
        [popping("a").isolate(second)],
        [popping("a").isolate(first)],
    ]
    assert skip_edges(stages) == (SkipEdge((first, "a"), 0, (3,)), SkipEdge((second, "a"), 1, (2,)))


def test_nested_layers_count():
    stages = [[nn.Sequential(nn.ReLU(), stashing("a"))], [nn.ModuleList([nn.Sequential(popping("a"))])]]
    assert skip_edges(stages) == (SkipEdge((None, "a"), 0, (1,)),)


def test_an_edge_is_immutable():
    edge = SkipEdge((None, "a"), 0, (1,))
    assert hash(edge) == hash(SkipEdge((None, "a"), 0, (1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        edge.source = 1


def test_named_skippables_in_the_order_of_execution():
    twice = popping("a")
    model = nn.Sequential(stashing("a"), nn.Sequential(nn.ReLU(), twice), WithDevice(popping("a"), "cpu"), twice)
    assert [name for name, _ in named_skippables(model)] == ["0", "1.1", "2", "3"]
    assert [name for name, _ in named_skippables(twice, "last")] == ["last"]
