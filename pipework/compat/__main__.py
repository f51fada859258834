"""`python -m pipework.compat script.py ...`: runs an old script unchanged."""

from pipework.compat.script import main

if __name__ == "__main__":
    main()
