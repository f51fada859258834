"""What a process that an old script has spawned imports in place of the script; see `pipework.compat.script`.

Imported in any other way it does nothing.
"""

from pipework.compat.script import run_as_spawned

if __name__ == "__mp_main__":
    run_as_spawned(globals())
