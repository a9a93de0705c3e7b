"""HEIC and JPEG XL: read where Pillow's plugins are installed, and else refused with the package's name."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import photo
from PIL import Image, ImageFile

from feedline import images
from feedline.datasets.decoding import loaded
from feedline.errors import MissingExtraError
from feedline.images import Recipe

STARTS = {
    "pillow_heif": b"\0\0\0\x1cftypheic\0\0\0\0",
    "pillow_jxl": b"\0\0\0\x0cJXL \r\n\x87\n",
}
EXTRAS = {"pillow_heif": "heic", "pillow_jxl": "jxl"}
RECIPE = Recipe((20, 30), images.WholeBox())


def file_of(module: str, image: Image.Image) -> bytes:
    """The format's beginning, and then raw pixels, as the stand-in below reads them."""
    start = STARTS[module].ljust(16, b"\0")
    return start + image.width.to_bytes(4) + image.height.to_bytes(4) + image.tobytes()


def stand_in(module: str) -> type[ImageFile.ImageFile]:
    class StandIn(ImageFile.ImageFile):
        format = module
        format_description = "stand-in for a plugin"

        def _open(self) -> None:
            self.fp.seek(16)
            self._size = int.from_bytes(self.fp.read(4)), int.from_bytes(self.fp.read(4))
            self._mode = "RGB"
            self.tile = [ImageFile._Tile("raw", (0, 0, *self._size), 24, ("RGB", 0, 1))]

    return StandIn


def register(module: str) -> None:
    Image.register_open(module, stand_in(module), lambda prefix: prefix[:12] == STARTS[module][:12])


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the plugins, and afterwards without the stand-ins."""
    Image.init()
    formats, openers = list(Image.ID), dict(Image.OPEN)
    for module in STARTS:
        monkeypatch.setitem(sys.modules, module, None)
    yield
    Image.ID[:] = formats
    Image.OPEN.clear()
    Image.OPEN.update(openers)


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize("module", STARTS)
def test_the_missing_package_is_named(module: str, tmp_path: Path) -> None:
    data = file_of(module, photo(40, 30))
    path = tmp_path / "a.heic"
    path.write_bytes(data)
    reads: list[Any] = [images.decode, images.probe, lambda source: images.read_one(source, RECIPE)]
    for read in reads:
        for source in (data, path):
            with pytest.raises(MissingExtraError, match=rf"pip install 'feedline\[{EXTRAS[module]}\]'"):
                read(source)


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize("module", STARTS)
def test_an_installed_plugin_is_registered_on_first_use(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = photo(40, 30)
    plugin = ModuleType(module)
    if module == "pillow_heif":
        monkeypatch.setattr(plugin, "register_heif_opener", lambda: register(module), raising=False)
        monkeypatch.setitem(sys.modules, module, plugin)
    else:  # registers itself when it is imported
        (tmp_path / f"{module}.py").write_text("import test_plugins as t\nt.register('pillow_jxl')\n")
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.syspath_prepend(str(tmp_path))
    data = file_of(module, image)
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    np.testing.assert_array_equal(images.decode(data), np.asarray(image))
    np.testing.assert_array_equal(np.asarray(loaded(str(path))), np.asarray(image))
    assert torch.equal(images.read_one(path, RECIPE), images.read_one(np.asarray(image), RECIPE))
    assert images.probe(io.BytesIO(data).getbuffer()).width == 40


@pytest.mark.usefixtures("no_plugins")
def test_two_bytes_are_no_proof_of_a_missing_package() -> None:
    """A damaged JPEG may begin like a JPEG XL codestream, and must stay an error that on_error can skip."""
    with pytest.raises(images.ImageError, match=r"JPEG XL files do so, too, and need pip install 'feedline\[jxl\]'"):
        images.decode(b"\xff\x0a" + bytes(100))


def test_damage_is_not_taken_for_a_missing_package() -> None:
    with pytest.raises(images.ImageError, match="of no image format that Pillow knows"):
        images.decode(b"\0\0\0\x1cftypqt  \0\0\0\0")
