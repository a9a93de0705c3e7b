"""The peers' virtual environments below build/peers, made once, one per file of pins in peers/.

Peers that are compatible share one; Pillow-SIMD, DALI, FFCV and Mosaic need their own. Packages are installed without
their dependencies: the pins are complete, and two of the peers would bring all of CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
FIRST = {"numpy", "pybind11", "setuptools", "torch"}
"""Build tools, and torch with its dependencies, installed first, so that no package can require another torch."""

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "peers"


class UnavailableError(Exception):
    """A peer that cannot be installed on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The pins of peers/NAME.txt, and Debian's `packages`.

    `variables` are set while packages are built, and `path` while they are used (relative to peers/).
    """

    name: str
    packages: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    path: str = ""

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python"

    @property
    def pins(self) -> dict[str, str]:
        """Versions by package."""
        lines = (PEERS / f"{self.name}.txt").read_text(encoding="utf-8").splitlines()
        return dict(line.split("==") for line in lines)

    def surroundings(self) -> dict[str, str]:
        """Environment variables of a contestant."""
        path = str(PEERS / self.path) if self.path else ""
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    def make(self) -> None:
        """Install missing packages; `UnavailableError` if that fails."""
        folder, done = HOME / self.name, HOME / f"{self.name}.done"
        state = blake2b((PEERS / f"{self.name}.txt").read_bytes(), digest_size=8).hexdigest()
        if done.exists() and done.read_text(encoding="utf-8") == state:
            return
        print(f"installing the environment {self.name}")
        _system(self.packages)
        _run([sys.executable, "-m", "venv", str(folder)])
        for name in FIRST & self.pins.keys():
            self._pip(f"{name}=={self.pins[name]}")
        self._pip("--no-deps", "--no-build-isolation", "--requirement", str(PEERS / f"{self.name}.txt"))
        done.write_text(state, encoding="utf-8")

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *arguments]
        _run(command, {**os.environ, **self.variables})


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("torch", packages=("libavdevice59", "libavfilter8", "libavformat59")),  # SPDL opens FFmpeg's
        Environment("pillow-simd", packages=("libjpeg62-turbo-dev", "zlib1g-dev"), variables={"CC": "cc -mavx2"}),
        Environment("dali"),
        Environment("ffcv", packages=("libopencv-dev", "libturbojpeg0-dev", "pkg-config")),
        Environment("mosaic", path="stand_ins"),
    )
}


def _system(packages: tuple[str, ...]) -> None:
    """Install Debian's packages as root; otherwise name them in the error."""
    missing = [name for name in packages if not _installed(name)]
    if not missing:
        return
    if os.geteuid() != 0:
        raise UnavailableError(f"needs, by Debian's names, {' '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-qq"], quiet)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], quiet)


def _installed(package: str) -> bool:
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout == "installed"
    except FileNotFoundError as error:
        raise UnavailableError("is set up on Debian and its kin only, and there is no dpkg here") from error


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise UnavailableError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["it said nothing"]
        raise UnavailableError(f"`{command_line(command)}` failed: {said[-1]}") from error


def command_line(command: list[str]) -> str:
    """The command as typed in the repository's folder."""
    return " ".join(command).replace(f"{ROOT}/", "")
