"""Bodies that run in several processes are started as those of the folder `mesh` are."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("mesh_conftest", Path(__file__).parents[1] / "mesh" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MESH = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MESH)

start = _MESH.start
on_ranks = _MESH.on_ranks
