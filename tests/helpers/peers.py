"""The peers' own writers: installed once, outside of the environment, without their dependencies for training.

Mosaic Streaming and LitData require torchvision, whose wheels install another torch with all of CUDA; writing files
needs none of it. So they are installed without dependencies into a folder of their own, which only the scripts in
tests/writers see.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

PACKAGES = (
    *("mosaicml-streaming==0.13.0", "brotli==1.2.1", "catalogue==2.0.10", "python-snappy==0.7.3", "zstd==1.5.7.2"),
    *("litdata==0.2.76", "lightning-utilities==0.15.3", "requests==2.34.2", "charset-normalizer==3.5.2"),
    *("idna==3.20", "certifi==2026.10.18"),
    *("tfrecord==1.14.6", "crc32c==2.9.post0", "protobuf==7.36.2"),
)
"""The packages to install, without their dependencies."""

LIGHTNING = ("lightning==2.6.6", "torchmetrics==1.9.0", "lightning-utilities==0.15.3")
"""Its trainer, without the loggers and strategies that need more."""

TRAINERS = (
    *("transformers==5.23.0", "tokenizers==0.23.3", "regex==2026.11.15", "timm==1.0.31"),
    *("fastai==2.8.12", "fastcore==2.2.39", "fastprogress==1.0.3", "fasttransform==0.0.5", "plum-dispatch==2.10.1"),
    *("beartype==0.23.1", "fastdownload==0.0.8"),
)
"""Trainers of other projects. fastprogress 1.0 draws no web pages, and so needs less."""

LOGGERS = (
    *("wandb==0.31.0", "click==8.5.1", "platformdirs==4.14.7", "pydantic==2.14.3", "pydantic_core==2.50.4"),
    *("annotated-types==0.8.0", "annotated-doc==0.0.7", "typing-inspection==0.4.5", "typing-extensions==4.16.0"),
    *("pyyaml==6.0.3", "requests==2.34.2", "charset-normalizer==3.5.2", "idna==3.20", "certifi==2026.10.18"),
    *("urllib3==2.8.0", "xxhash==4.1.0", "packaging==26.3", "protobuf==7.36.2"),
    *("mlflow-skinny==3.17.2", "databricks-sdk==0.156.0", "fastapi==0.165.0", "starlette==1.10.0", "anyio==4.16.0"),
    *("sniffio==1.3.1", "cachetools==7.3.2", "gitpython==3.2.1", "gitdb==4.0.12", "smmap==5.0.3", "zipp==4.1.2"),
    *("importlib-metadata==9.1.0", "opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2", "sqlparse==0.6.1"),
    *("opentelemetry-proto==1.45.2", "opentelemetry-semantic-conventions==0.66b2", "python-dotenv==1.2.4"),
)
"""Weights & Biases and MLflow, without their servers."""

TORCHVISION = "torchvision==0.28.0"
"""Its Python part is enough: the compiled one belongs to another build of torch, and does not load with this one."""

TORCHAUDIO = "torchaudio==2.11.0"
"""Also without its compiled part, which requires CUDA; mel spectrograms are operators of torch."""

ALBUMENTATIONS = (
    *("albumentations==2.0.8", "albucore==0.0.24", "opencv-python-headless==5.0.0.93"),
    *("simsimd==6.5.16", "stringzilla==4.6.3"),
)
"""albumentations and OpenCV, for benchmarks."""

DECORD = "decord==0.6.0"
"""A video loader, for benchmarks."""

OPERATORS = """

if not _has_ops():
    declarations = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        declarations.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Declares the operators whose names the import looks up; every process that imports the copy needs them."""

BUILD = Path(__file__).parents[2] / "build"
WRITERS = Path(__file__).parent / "writers"


def peers() -> Path:
    """The folder that the peers are installed in."""
    return _once("peers", repr(PACKAGES), lambda place: _install(place, PACKAGES))


def lightning() -> Path:
    """The folder that Lightning is installed in."""
    return _once("lightning", repr(LIGHTNING), lambda place: _install(place, LIGHTNING))


def trainers() -> list[Path]:
    """Folders with Lightning, Transformers, timm and fastai, and what they import."""
    return [
        _once("trainers", repr(TRAINERS), lambda place: _install(place, TRAINERS)), lightning(), torchvision()
    ]  # fmt: skip


def loggers() -> Path:
    """The folder that Weights & Biases and MLflow are installed in."""
    return _once("loggers", repr(LOGGERS), lambda place: _install(place, LOGGERS))


def albumentations() -> Path:
    """The folder that albumentations and OpenCV are installed in."""
    return _once("albumentations", repr(ALBUMENTATIONS), lambda place: _install(place, ALBUMENTATIONS))


def decord() -> Path:
    """The folder that decord is installed in."""
    return _once("decord", DECORD, lambda place: _install(place, [DECORD]))


def torchvision() -> Path:
    """The folder that torchvision is installed in, without its operators."""
    return _once("torchvision", f"{TORCHVISION} {OPERATORS}", _install_torchvision)


def _install_torchvision(place: Path) -> None:
    _install(place, [TORCHVISION])
    with (place / "torchvision" / "extension.py").open("a") as file:
        file.write(OPERATORS)


def torchaudio() -> Path:
    """The folder that torchaudio is installed in, without its libraries."""
    return _once("torchaudio", TORCHAUDIO, _install_torchaudio)


def _install_torchaudio(place: Path) -> None:
    _install(place, [TORCHAUDIO])
    shutil.rmtree(place / "torchaudio" / "lib")


def _install(place: Path, packages: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Python compiles what is imported, a small part.
    _done([*command, "--no-compile", "--target", str(place), *packages], {})


def written(script: str) -> Path:
    """The folder with what `tests/writers/SCRIPT.py` writes, with the peers' own libraries; for reading only."""
    sources = b"".join(path.read_bytes() for path in sorted(WRITERS.glob("*.py"))).decode()
    installed = peers()
    command = [sys.executable, str(WRITERS / f"{script}.py")]
    return _once(
        script, f"{installed} {sources}", lambda place: _done([*command, str(place)], {"PYTHONPATH": str(installed)})
    )


def _once(name: str, of: str, make: Callable[[Path], None]) -> Path:
    """A folder below build/ that `make` fills, when it is first asked for; it appears whole."""
    key = hashlib.sha256(f"{of} {sys.version_info[:2]}".encode()).hexdigest()[:12]
    place = BUILD / f"{name}-{key}"
    if not place.exists():
        BUILD.mkdir(exist_ok=True)
        partial = Path(mkdtemp(dir=BUILD, prefix=f"{name}-partial-"))
        make(partial)
        try:
            partial.rename(place)
        except OSError:  # another process of the test run was faster
            shutil.rmtree(partial)
    return place


def _done(command: list[str], environment: dict[str, str]) -> None:
    outcome = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )
    assert outcome.returncode == 0, outcome.stderr


if __name__ == "__main__":
    if sys.argv[1:] == ["torchvision"]:
        print(torchvision())
    else:
        peers()
        trainers()
        loggers()
        torchaudio()
