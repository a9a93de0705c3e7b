"""The forms of a corpus: files, tars, and the formats that only some peers read.

Each is written once, next to the files, by the peer's own writer. Its time is not counted; its size is reported.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from images.corpus import Corpus
from images.environments import ENVIRONMENTS, PEERS, UnavailableError, command_line
from images.peers.task import in_random_order

SHARDS = 8

Writer = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a corpus on disk: `write(files, target)` makes the file or folder `name`."""

    name: str
    write: Writer

    def nbytes(self, corpus: Corpus) -> int:
        """The size of the form, which is written first if missing; `UnavailableError` if that fails."""
        target = corpus.root / self.name
        if not target.exists():
            print(f"writing {corpus.name} as {self.name}")
            unfinished = corpus.root / f"unfinished-{self.name}"
            _remove(unfinished)
            self.write(corpus.files, unfinished)
            unfinished.rename(target)
        return _size(target)


def _tar(files: Path, target: Path) -> None:
    """WebDataset's layout: the key is an image's name, its members are `key.jpg` and `key.cls`."""
    target.mkdir()
    samples = in_random_order(files)
    for shard in range(SHARDS):
        with tarfile.open(target / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for path, label in samples[shard::SHARDS]:
                tar.addfile(*_member(f"{Path(path).stem}.jpg", Path(path).read_bytes()))
                tar.addfile(*_member(f"{Path(path).stem}.cls", str(label).encode()))


def _member(name: str, data: bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, io.BytesIO(data)


def _nothing(_files: Path, _target: Path) -> None:
    raise UnavailableError("the corpus was not made")


def _by_peer(environment: str, script: str, *options: str) -> Writer:
    def write(files: Path, target: Path) -> None:
        there = ENVIRONMENTS[environment]
        there.make()
        _run([str(there.python), str(PEERS / script), str(files), str(target), *options], there.surroundings())

    return write


def _open_writer(*options: str) -> Writer:
    def write(files: Path, target: Path) -> None:
        _run([sys.executable, "-m", "feedline.cli", "pack", str(files), str(target), *options], dict(os.environ))

    return write


FORMS = {
    form.name: form
    for form in (
        Form("files", _nothing),
        Form("tar", _tar),
        Form("mds", _by_peer("mosaic", "write_mds.py")),
        Form("litdata", _by_peer("torch", "write_litdata.py")),
        Form("jpg.beton", _by_peer("ffcv", "write_beton.py", "jpg")),
        Form("raw.beton", _by_peer("ffcv", "write_beton.py", "raw")),
        Form("grid", _open_writer("--grid")),
        Form("decoded", _open_writer("--decoded")),
    )
}


def sizes(corpus: Corpus, names: Iterable[str]) -> dict[str, int]:
    """The bytes of each available form; for the others, a reason is printed."""
    found = {}
    for name in names:
        try:
            found[name] = FORMS[name].nbytes(corpus)
        except UnavailableError as error:
            print(f"{corpus.name} as {name}: {error}")
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if any(map(str.isalpha, line))]
        raise UnavailableError(f"`{command_line(command)}` failed: {said[-1] if said else 'it said nothing'}")
