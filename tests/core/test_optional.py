from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from feedline.core import optional
from feedline.core.optional import after_import
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


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package's module that has not been imported."""
    package = tmp_path / "late_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "late_package.module"
    sys.meta_path[:] = finders
    for name in ("late_package", "late_package.module"):
        sys.modules.pop(name, None)


def test_an_act_follows_the_import_of_a_module_once(late: str) -> None:
    values: list[int] = []
    after_import(late, lambda: values.append(sys.modules[late].VALUE))
    import_module("late_package")
    assert values == []
    import_module(late)
    import_module(late)
    assert values == [3]
    assert import_module(late).VALUE == 3


def test_an_act_is_immediate_for_a_module_that_has_been_imported(late: str) -> None:
    import_module(late)
    values: list[int] = []
    after_import(late, lambda: values.append(1))
    assert values == [1]


def test_an_act_waits_for_a_module_that_cannot_be_found_yet(late: str, tmp_path: Path) -> None:
    values: list[int] = []
    after_import("late_package.other", lambda: values.append(1))
    with pytest.raises(ModuleNotFoundError):
        import_module("late_package.other")
    assert values == []
    (tmp_path / "late_package" / "other.py").touch()
    invalidate_caches()
    import_module("late_package.other")
    sys.modules.pop("late_package.other")
    assert values == [1]


def test_an_act_waits_for_a_module_whose_import_has_begun(late: str, tmp_path: Path) -> None:
    values: list[int] = []
    code = "from feedline.core.optional import after_import\nimport sys\nafter_import(__name__, sys.act)\nVALUE = 4"
    (tmp_path / "late_package" / "module.py").write_text(code)
    (tmp_path / "late_package" / "other.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "act", lambda: values.append(sys.modules[late].VALUE), raising=False)
        import_module(late)
        assert values == []
        import_module("late_package.other")
        assert values == [4]
    sys.modules.pop("late_package.other")
