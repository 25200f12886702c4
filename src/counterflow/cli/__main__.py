"""``python -m counterflow.cli``."""

from counterflow.cli import main

if __name__ == "__main__":
    main()
