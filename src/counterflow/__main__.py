"""``python -m counterflow``: the same as the command ``counterflow``."""

from counterflow.cli import main

if __name__ == "__main__":
    main()
