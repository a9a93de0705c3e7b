"""`python -m feedline.cli` is the `feedline` command."""

from feedline.cli.app import main

if __name__ == "__main__":  # not in worker processes, which import the main module
    main()
