from pipework.saving import files


def make(directory, *names):
    for name in names:
        path = directory / name
        path.mkdir()
        if "!" not in name:
            (path / "COMPLETE").touch()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_is_replaced_comes_after_what_replaces_it(tmp_path):
    make(tmp_path, "step-00000001.replaced", "step-00000001", "step-00000002.replaced", "step-00000000")
    make(tmp_path, "step-00000009.tmp")
    assert [path.name for path in files.saved_steps(tmp_path)] == [
        "step-00000002.replaced",
        "step-00000001",
        "step-00000001.replaced",
        "step-00000000",
    ]


def test_the_next_save_clears_up(tmp_path):
    make(tmp_path, "step-00000001.replaced", "step-00000001", "step-00000002.replaced", "step-00000003.tmp", "mine.tmp")
    make(tmp_path, "step-00000004.replaced")
    (tmp_path / "step-00000004").mkdir()  # never completed
    files.begin(tmp_path, 7)
    assert names(tmp_path) == ["mine.tmp", *(f"step-0000000{n}" for n in (1, 2, 4)), "step-00000007.tmp"]
    assert files.is_complete(tmp_path / "step-00000004")
