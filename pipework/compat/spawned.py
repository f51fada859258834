"""The main module of processes that an old script spawns; see `pipework.compat.script`.

An ordinary import has no effect.
"""

from pipework.compat.script import run_as_spawned

if __name__ == "__mp_main__":
    run_as_spawned(globals())
