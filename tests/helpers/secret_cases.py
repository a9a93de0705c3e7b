"""Places where a secret of a store could appear."""

from __future__ import annotations

import io
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from feedline import stores
from feedline.errors import ArgumentError, NotPicklableError


def shown_by(store: Any, proxy: Any) -> str:
    """Errors with their tracebacks and causes, representations, pickles, statistics: after each kind of fault."""
    shown = io.StringIO()
    for fault in (None, "expired", "reset", "503", "503 Retry-After", "truncated", "short"):
        for path in ("train/1.bin", "missing", "train//1.bin"):
            proxy.forced.extend([fault, fault] if fault else [])
            try:
                store.read(path, 0, 3)
            except (stores.StoreError, ArgumentError) as error:
                shown.write("".join(traceback.format_exception(error)) + repr(error) + repr(error.__context__))
                shown.write(repr(pickle.dumps(error)))
            proxy.forced.clear()
    with pytest.raises(NotPicklableError) as refused:
        pickle.dumps(store)
    shown.write(f"{store!r} {store.url} {refused.value} {stores.statistics()} {vars(store)}")
    return shown.getvalue()


def kept_in(folder: Path) -> bytes:
    """All files of a folder, end to end."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
