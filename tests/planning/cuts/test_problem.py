import math

import pytest

from pipework.planning.cuts import CutProblem

TWO = [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": ()}, "placement is \\(\\)"),
        ({"placement": (0, 2)}, "wanted a worker for each stage, numbered from 0 on"),
        ({"seconds": TWO[:1]}, "seconds has 1 rows: wanted 2, one for each stage"),
        ({"seconds": [[1, 1, 1], [1, 1]]}, "seconds of stage 1 has 2 numbers: wanted 3"),
        ({"seconds": [[1, 1, -1], [1, 1, 1]]}, "seconds of stage 0: number 2 is -1"),
        ({"seconds": [[1, 1, 1], [1, math.nan, 1]]}, "seconds of stage 1: number 1 is nan"),
        ({"memory": [[1, 1, 1]]}, "memory has 1 rows"),
        ({"memory": TWO, "limits": [1]}, "limits has 1 numbers: wanted 2, one for each worker"),
        ({"memory": TWO, "limits": [1, 0]}, "limits of worker 1 is 0: wanted a positive number"),
        ({"boundary": TWO[:1]}, "boundary of boundary 0 has 3 numbers: wanted 2"),
        ({"boundary": -0.5}, "boundary: number 0 is -0.5"),
        ({"placement": (0, 1, 2, 3), "seconds": TWO * 2}, "4 stages need at least 4 layers, got 3"),
    ],
)
def test_wrong_problems_are_refused(arguments: dict[str, object], message: str) -> None:
    given = {"placement": (0, 1), "seconds": TWO} | arguments
    with pytest.raises(ValueError, match=message):
        CutProblem(**given)
