"""Reads random JPEGs of every installed encoder with feedline and with Pillow; all pixels of all rows must be equal.

Run by `test_decode_verdicts.py` and by `make fuzz`. Usage: encoders.py COUNT SEED. Pillow always takes part; OpenCV,
simplejpeg, imagecodecs, pyvips, FFmpeg, ImageMagick, GraphicsMagick and libjpeg-turbo's cjpeg do if they are installed,
mozjpeg as an optimizer, and the package jpeglib with libjpeg 6b to 9f, libjpeg-turbo 1.2 to 2.1 and mozjpeg 1 to 4.
Prints the number of files that each encoder wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from crafted_jpegs import all_factors, crafted
from image_cases import by_pillow, encoded, photo, rgb
from PIL import Image, ImageFile

from feedline import images
from feedline.images import Recipe

Encoder = Callable[[Image.Image, random.Random], bytes]
FACTORS = list(all_factors())
ROWS = 3
"""Rows of each file, in addition to the whole image."""


def by_pillow_itself(image: Image.Image, rng: random.Random) -> bytes:
    return encoded(
        image,
        quality=rng.randint(1, 100),
        progressive=rng.random() < 0.3,
        optimize=rng.random() < 0.3,
        restart_marker_blocks=rng.choice([0, 0, 1, 7]),
        **rng.choice([{"keep_rgb": True}, *({"subsampling": name} for name in ("4:4:4", "4:2:2", "4:2:0"))]),
    )


def by_hand(image: Image.Image, rng: random.Random) -> bytes:
    """Random waves, with any sampling factors."""
    return crafted(image.width % 180 + 1, image.height % 120 + 1, rng.choice(FACTORS), rng.randrange(1 << 20))


def by_opencv(image: Image.Image, rng: random.Random) -> bytes:
    cv2 = importlib.import_module("cv2")
    samplings = [getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in (411, 420, 422, 440, 444)]
    options = {
        cv2.IMWRITE_JPEG_QUALITY: rng.randint(1, 100),
        cv2.IMWRITE_JPEG_PROGRESSIVE: rng.randint(0, 1),
        cv2.IMWRITE_JPEG_OPTIMIZE: rng.randint(0, 1),
        cv2.IMWRITE_JPEG_RST_INTERVAL: rng.choice([0, 0, 5]),
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: rng.choice(samplings),
    }
    _, data = cv2.imencode(".jpg", np.asarray(image), [number for pair in options.items() for number in pair])
    return bytes(data)


def by_simplejpeg(image: Image.Image, rng: random.Random) -> bytes:
    module = importlib.import_module("simplejpeg")
    sampling = rng.choice(["444", "422", "420", "440", "411"])
    data: bytes = module.encode_jpeg(
        np.ascontiguousarray(image), quality=rng.randint(1, 100), colorspace="RGB", colorsubsampling=sampling
    )
    return data


def by_vips(image: Image.Image, rng: random.Random) -> bytes:
    module = importlib.import_module("pyvips")
    data: bytes = module.Image.new_from_array(np.asarray(image)).jpegsave_buffer(
        Q=rng.randint(1, 100),
        interlace=rng.random() < 0.3,
        subsample_mode=rng.choice(["on", "off"]),
        trellis_quant=rng.random() < 0.5,
        optimize_scans=rng.random() < 0.5,
    )
    return data


def by_imagecodecs(image: Image.Image, rng: random.Random) -> bytes:
    """JPEGs in all color spaces that libjpeg-turbo writes."""
    module = importlib.import_module("imagecodecs")
    stored = rng.choice(["YCBCR", "YCBCR", "RGB", "GRAYSCALE", "CMYK", "YCCK"])
    mode = {"GRAYSCALE": "L", "CMYK": "CMYK", "YCCK": "CMYK"}.get(stored, "RGB")
    data: bytes = module.jpeg8_encode(
        np.asarray(image.convert(mode)),
        rng.randint(1, 100),
        colorspace={"L": "GRAYSCALE"}.get(mode, mode),
        outcolorspace=stored,
        subsampling=rng.choice(["444", "422", "420", "411", "440"]) if mode == "RGB" else None,
        smoothing=rng.choice([0, 0, 30]),
        optimize=rng.random() < 0.3,
    )
    return data


LIBRARIES = (
    *("6b", "7", "8", "8a", "8b", "8c", "8d", "9", "9a", "9b", "9c", "9d", "9e", "9f"),
    *("turbo120", "turbo130", "turbo140", "turbo150", "turbo200", "turbo210"),
    *("mozjpeg101", "mozjpeg201", "mozjpeg300", "mozjpeg403"),
)


def by_library(version: str) -> Encoder:
    """The encoder of one release of libjpeg or of a successor."""

    def encode(image: Image.Image, rng: random.Random) -> bytes:
        module = importlib.import_module("jpeglib")
        module.version.set(version)
        spaces = ["JCS_YCbCr", "JCS_YCbCr", "JCS_YCbCr", "JCS_RGB", "JCS_CMYK", "JCS_YCCK"]
        # From color to gray, later releases of mozjpeg crash.
        stored = rng.choice(spaces + ["JCS_GRAYSCALE"] * ("mozjpeg" not in version))
        space = "JCS_CMYK" if stored in ("JCS_CMYK", "JCS_YCCK") else "JCS_RGB"
        pixels = np.asarray(image.convert("CMYK" if space == "JCS_CMYK" else "RGB"))
        file = module.from_spatial(np.ascontiguousarray(pixels), getattr(module, space))
        file.jpeg_color_space = getattr(module, stored)
        if stored == "JCS_YCbCr":
            luma = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
            file.samp_factor = np.array([luma, (1, 1), (1, 1)])
        file.progressive_mode = rng.random() < 0.3
        codings = [[], ["+OPTIMIZE_CODING"], ["+ARITH_CODE"] if version[0] in "789" else []]
        flags = [*rng.choice(codings), *rng.choice([[], [], ["-DO_FANCY_SAMPLING"]])]
        method = rng.choice([module.DCTMethod.JDCT_ISLOW, module.DCTMethod.JDCT_IFAST, module.DCTMethod.JDCT_FLOAT])
        with NamedTemporaryFile(suffix=".jpg") as place:
            smoothing = rng.choice([None, 30])
            file.write_spatial(
                place.name, rng.randint(1, 100), dct_method=method, smoothing_factor=smoothing, flags=flags
            )
            return Path(place.name).read_bytes()

    return encode


def by_mozjpeg(image: Image.Image, rng: random.Random) -> bytes:
    """Progressive, with mozjpeg's scans."""
    data: bytes = importlib.import_module("mozjpeg_lossless_optimization").optimize(by_pillow_itself(image, rng))
    return data


def piped(image: Image.Image, *command: str) -> bytes:
    return subprocess.run(command, input=encoded(image, "PPM"), capture_output=True, check=True).stdout


def by_ffmpeg(image: Image.Image, rng: random.Random) -> bytes:
    format_ = rng.choice(["yuvj420p", "yuvj422p", "yuvj444p"])
    options = ["-q:v", str(rng.randint(1, 31)), "-pix_fmt", format_, "-huffman", rng.choice(["default", "optimal"])]
    source = ["-loglevel", "error", "-f", "image2pipe", "-c:v", "ppm", "-i", "-"]
    return piped(image, "ffmpeg", *source, *options, "-f", "mjpeg", "-")


def by_magick(*command: str) -> Encoder:
    """The encoder of ImageMagick or of GraphicsMagick."""

    def encode(image: Image.Image, rng: random.Random) -> bytes:
        sampling = rng.choice(["4:1:0", "4:1:1", "4:2:0", "4:2:2", "4:4:0", "4:4:4", "2x4", "3x1", "1x3", "3x2"])
        if command[0] == "gm":  # takes factors only
            sampling = rng.choice(["1x1", "2x1", "2x2", "1x2", "4x1", "4x2", "2x4", "3x1", "1x3", "3x2"])
        interlace = rng.choice(["None", "JPEG" if command[0] != "gm" else "Line"])
        options = ["-sampling-factor", sampling, "-interlace", interlace, "-quality", str(rng.randint(1, 100))]
        return piped(image, *command, "ppm:-", *options, "jpg:-")

    return encode


def by_cjpeg(image: Image.Image, rng: random.Random) -> bytes:
    kind = rng.choice(["-progressive", "-optimize", "-grayscale", "-arithmetic"])
    options = [kind, rng.choice(["-restart 1", "-restart 3B", "-dct float", "-smooth 20"])]
    sample = rng.choice(["1x1", "2x1", "1x2", "2x2", "4x1", "1x4", "4x2", "2x4", "2x1,1x2,1x1"])
    words = [word for option in options for word in option.split()]
    return piped(image, "cjpeg", "-quality", str(rng.randint(1, 100)), "-sample", sample, *words)


def encoders() -> dict[str, Encoder]:
    """Encoders that are installed."""
    modules = {"cv2": by_opencv, "simplejpeg": by_simplejpeg, "imagecodecs": by_imagecodecs, "pyvips": by_vips}
    modules["mozjpeg_lossless_optimization"] = by_mozjpeg
    programs: dict[str, Encoder] = {"ffmpeg": by_ffmpeg, "cjpeg": by_cjpeg}
    programs |= {"/usr/bin/convert": by_magick("/usr/bin/convert"), "gm": by_magick("gm", "convert")}
    found: dict[str, Encoder] = {"Pillow": by_pillow_itself, "crafted": by_hand}
    found |= {name: encoder for name, encoder in modules.items() if importlib.util.find_spec(name)}
    if importlib.util.find_spec("jpeglib"):
        found |= {f"jpeglib {name}": by_library(name) for name in LIBRARIES}
    return found | {Path(name).name: encoder for name, encoder in programs.items() if shutil.which(name)}


def random_image(rng: random.Random) -> Image.Image:
    """Parts of a photograph of all sizes, some with noise."""
    width, height = (max(1, int(2 ** rng.uniform(0, most))) for most in (9.5, 9.2))
    image = photo(width, height, rng.randrange(1 << 30))
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 40, (height, width, 3))
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return image


def random_recipe(rng: random.Random) -> Recipe:
    size = rng.choice([(224, 224), (64, 64), (rng.randint(1, 99), rng.randint(1, 99))])
    crops = [images.RandomBox((0.01, 1.0), (0.3, 3)), images.CenterBox(rng.randint(1, 256)), images.WholeBox()]
    return Recipe(size, rng.choice(crops), flip=0.5, interpolation=rng.choice(["bilinear", "bicubic"]))


def check(data: bytes, rng: random.Random) -> None:
    """AssertionError for a row that differs from Pillow's."""
    whole = rgb(data)
    np.testing.assert_array_equal(images.decode(data), whole)
    for _ in range(ROWS):
        recipe, key = random_recipe(rng), rng.getrandbits(64)
        plan = images.geometry(recipe, key, *whole.size)
        if plan.full[0] * plan.full[1] > 1 << 21:  # Pillow computes all of it
            continue
        wanted = by_pillow(whole, plan, recipe.interpolation)
        np.testing.assert_array_equal(images.read_one(data, recipe, key).numpy(), wanted)


def main(count: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    ImageFile.MAXBLOCK = 1 << 24  # Pillow's encoder cannot write more than this at once
    rng = random.Random(seed)
    available, written = encoders(), Counter[str]()
    for number in range(count):
        name = list(available)[number % len(available)]
        data = available[name](random_image(rng), rng)
        try:
            check(data, rng)
        except (AssertionError, images.ImageError):
            Path(f"encoder-{seed}.jpg").write_bytes(data)
            print(f"encoder-{seed}.jpg by {name} is read differently; so far {dict(written)}", file=sys.stderr)
            raise
        written[name] += 1
    print(dict(written))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
