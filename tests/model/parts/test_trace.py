"""What each part does, of a trace that is written out."""

import math

from pipework.model.parts.trace import (
    EARLIER,
    END,
    HERE,
    LATER,
    PartSpan,
    Source,
    Trace,
    UnitCall,
    call_name,
    positional_names,
    unit_of,
)

X, Y = Source("input", "x", 0), Source("input", "y", 0)
A, B, AGAIN = (Source("call", call, 0) for call in ("a#0", "b#0", "a#1"))
#             a#0    b#0    a#1    c#0
LAST, WEIGHT = Source("call", "c#0", 0), Source("parameter", "w", 0)
USES = {X: {0}, A: {1, 3}, B: {2}, AGAIN: {3}, Y: {2}, LAST: {END}, WEIGHT: {3}}
TRACE = Trace(
    "Net",
    ("a#0", "b#0", "a#1", "c#0"),
    {source: frozenset(uses) for source, uses in USES.items()},
    changed=frozenset({"b#0"}),
    changing=frozenset({"a#1"}),
    changed_inputs=frozenset(),
    inputs=frozenset({X, Y}),
    parameters=("x", "y"),
)
FIRST, SECOND = PartSpan(TRACE, 0, 2, is_last=False), PartSpan(TRACE, 2, 4, is_last=True)


def test_calls_of_a_unit_in_their_order() -> None:
    assert FIRST.calls == {
        "a": (UnitCall("a#0", HERE, 0, 1, False, False), UnitCall("a#1", LATER, 2, 5, False, True)),
        "b": (UnitCall("b#0", HERE, 1, 3, True, False),),
        "c": (UnitCall("c#0", LATER, 3, 7, False, False),),
    }
    assert [call.place for call in SECOND.calls["a"]] == [EARLIER, HERE]


def test_what_later_parts_read() -> None:
    assert [FIRST.is_sent(each) for each in (X, Y, A)] == [False, True, True]
    assert FIRST.is_sent(Source("input", "mask", 0)), "the sample had none, so nothing is known of it"


def test_what_a_part_reads() -> None:
    assert [span.reads(WEIGHT) for span in (FIRST, SECOND)] == [False, True]
    assert [span.reads(LAST) for span in (FIRST, SECOND)] == [False, True]
    assert not SECOND.reads(Source("parameter", "unknown", 0))


def test_names() -> None:
    assert unit_of(call_name("blocks.0#x", 12)) == "blocks.0#x"
    assert positional_names((), 2) == ("0", "1")
    assert math.isinf(END)
