"""The `feedline` command: the only part of feedline that prints."""

from feedline.cli.app import main

__all__ = ["main"]
