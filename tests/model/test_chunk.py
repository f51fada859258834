import pytest
import torch

from pipework import Chunk, NoChunk


def test_marks_show_what_they_mark() -> None:
    assert repr(NoChunk([1])) == "NoChunk([1])"
    assert repr(Chunk("x", dim=-1)) == "Chunk('x', dim=-1)"
    assert Chunk(torch.ones(2)).dim == 0


@pytest.mark.parametrize("dim", [True, 1.0, "batch", None])
def test_a_dimension_is_a_number(dim: object) -> None:
    with pytest.raises(TypeError, match=r"Chunk got dim=.*: wanted the number of the dimension"):
        Chunk(torch.ones(2), dim)  # type: ignore[arg-type]
