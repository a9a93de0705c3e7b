from __future__ import annotations

import json

import pytest

from feedline.core import optional
from feedline.errors import MissingExtraError


def test_what_is_there_is_given() -> None:
    assert optional.load("json", "arrow", "Parquet") is json


def test_what_is_missing_is_named_with_its_pip_command() -> None:
    with pytest.raises(
        MissingExtraError, match=r"^Parquet needs no_such_thing\.parquet, .*: pip install 'feedline\[arrow\]'$"
    ):
        optional.load("no_such_thing.parquet", "arrow", "Parquet")


def test_what_is_broken_keeps_its_own_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_extra.py").write_text("raise OSError('libcuda.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=r"cannot be imported \(OSError: libcuda") as caught:
        optional.load("broken_extra", "video", "Frames")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_missing_part_of_an_installed_package_is_not_a_missing_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_there.py").write_text("import its_own_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="its_own_dependency"):
        optional.load("half_there", "video", "Frames")
