"""``python -m graphopt``."""

from graphopt.cli import main

if __name__ == "__main__":
    main()
