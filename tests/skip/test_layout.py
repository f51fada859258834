import pytest
from torch import nn

from pipework.model.sequential import WithDevice
from pipework.skip import Namespace, pop, skippable, stash, verify_skippables
from pipework.skip.layout import SkipEdge, named_skippables, skip_edges


class Layer(nn.Module):
    pass


def stashing(*names):
    return skippable(stash=names)(Layer)()


def popping(*names):
    return skippable(pop=names)(Layer)()


@pytest.mark.parametrize(
    ("stages", "edges"),
    [
        ([], []),
        ([[nn.ReLU()], []], []),
        ([[stashing("a")], [nn.ReLU()], [popping("a")]], [(0, (2,))]),
        ([[nn.ReLU()], [stashing("a"), popping("a")]], [(1, (1,))]),
        (
            [[stashing("a"), popping("a")], [], [popping("a"), nn.ReLU(), popping("a")], [popping("a")]],
            [(0, (0, 2, 3))],
        ),
        ([[nn.Sequential(nn.ReLU(), stashing("a"))], [nn.ModuleList([nn.Sequential(popping("a"))])]], [(0, (1,))]),
    ],
)
def test_edges(stages, edges):
    assert skip_edges(stages) == tuple(SkipEdge((None, "a"), *edge) for edge in edges)


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


def test_named_skippables_in_the_order_of_execution():
    twice = popping("a")
    model = nn.Sequential(stashing("a"), nn.Sequential(nn.ReLU(), twice), WithDevice(popping("a"), "cpu"), twice)
    assert [name for name, _ in named_skippables(model)] == ["0", "1.1", "2", "3"]
    assert [name for name, _ in named_skippables(twice, "last")] == ["last"]


@skippable(stash=["1to3"])
class Layer1(nn.Module):
    def forward(self, x):
        yield stash("1to3", x)
        return x


class Layer2(nn.Module):
    def forward(self, x):
        return x


@skippable(pop=["1to3"])
class Layer3(nn.Module):
    def forward(self, x):
        return x + (yield pop("1to3"))


def verdict(*layers, exclusive=False):
    """The bullets of the error."""
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers), exclusive=exclusive)
    first, second, *bullets = str(caught.value).split("\n")
    assert first == "one or more pairs of stash and pop do not match:"
    assert second == ""
    assert all(bullet.startswith("* ") for bullet in bullets)
    return [bullet[2:] for bullet in bullets]


UNPOPPED, UNSTASHED = (
    "no module declared '1to3' as poppable but stashed",
    "declared '1to3' as poppable but it was not stashed",
)
AGAIN = "redeclared '1to3' as {} but not isolated by namespace"


@pytest.mark.parametrize(
    ("layers", "faults"),
    [
        ([Layer1, Layer2, Layer3], []),
        ([Layer1, Layer2], [UNPOPPED]),
        ([Layer2, Layer3], [f"'1' {UNSTASHED}"]),
        ([Layer1, Layer2, Layer3, Layer3], [f"'3' {AGAIN.format('poppable')}"]),  # but for `exclusive`, all is right
        ([Layer1, Layer1, Layer2, Layer3], [f"'1' {AGAIN.format('stashable')}"]),
        ([Layer3, Layer1], [f"'0' {UNSTASHED}", UNPOPPED]),
    ],
)
def test_every_stash_has_its_pop(layers, faults):
    made = [layer() for layer in layers]
    if faults:
        assert verdict(*made, exclusive=True) == faults
    if faults == [] or "poppable but not isolated" in faults[0]:
        verify_skippables(nn.Sequential(*made))


@pytest.mark.parametrize("namespaces", [0, 1])
def test_both_in_one_layer(namespaces):
    both = skippable(stash=["foo"], pop=["foo"])(Layer2)()
    if namespaces:
        both.isolate(Namespace())
    assert verdict(both) == ["'0' declared 'foo' both as stashable and as poppable"]


def test_namespaces_keep_equal_names_apart():
    first, second = Namespace(), Namespace()
    model = nn.Sequential(
        stashing("foo").isolate(first),
        stashing("foo").isolate(second),
        popping("foo").isolate(second),
        popping("foo").isolate(first),
    )
    verify_skippables(model, exclusive=True)
    model[3].isolate(Namespace())
    assert verdict(*model) == [
        "'3' declared 'foo' as poppable but it was not stashed",
        "no module declared 'foo' as poppable but stashed",
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_nested_ones_are_found_and_named_by_dotted_names(depth):
    inner = nn.Sequential(Layer2(), stashing("foo"))
    outer = inner if depth == 1 else nn.ModuleDict({"block": inner})
    path = "0.1" if depth == 1 else "0.block.1"
    verify_skippables(nn.Sequential(outer, popping("foo")))
    assert verdict(nn.Sequential(stashing("foo")), popping("foo"), outer) == [
        f"'2{path[1:]}' redeclared 'foo' as stashable but not isolated by namespace"
    ]


def test_names_do_not_show_with_device():
    assert verdict(WithDevice(popping("foo"), "cpu")) == ["'0' declared 'foo' as poppable but it was not stashed"]


def test_a_layer_used_twice_pops_twice():
    join = popping("foo")
    fork = stashing("foo")
    verify_skippables(nn.Sequential(fork, join, join))
    assert verdict(fork, join, join, exclusive=True) == [
        "'2' redeclared 'foo' as poppable but not isolated by namespace"
    ]
    assert verdict(fork, fork, join) == ["'1' redeclared 'foo' as stashable but not isolated by namespace"]


def test_missing_children_and_models_without_skips():
    model = nn.Sequential(nn.ReLU())
    model.register_module("1", None)
    verify_skippables(model)
