"""`python -m feedline.cli` is the `feedline` command."""

from feedline.cli.app import main

main()
