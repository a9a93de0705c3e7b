"""The `feedline` command: the only part of feedline that prints."""

from feedline.core.interrupts import quiet_imports

with quiet_imports():
    from feedline.cli.app import main

__all__ = ["main"]
