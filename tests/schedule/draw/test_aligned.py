from pipework.schedule.draw.aligned import aligned


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([["name", "1"], ["a", "1,000"]], left={0}) == ["  name      1", "  a     1,000"]
    assert aligned([["name", "1"], ["a", "1,000"]], left={1}) == ["  name  1    ", "     a  1,000"]
