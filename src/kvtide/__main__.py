"""``python -m kvtide``: the command line, where its script is not on the path."""

from kvtide.cli import main

if __name__ == "__main__":
    main()
