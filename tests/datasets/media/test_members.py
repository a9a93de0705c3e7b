"""Clips of videos and ranges of sounds in tar shards, as `feedline pack` makes them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
import torch
from media_files import ffmpeg
from packing_cases import packed

import feedline as fl
from feedline.datasets import Clips, Waveforms
from feedline.errors import ArgumentError, SampleError, StateError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of two videos and two sounds each, of several formats."""
    folder = tmp_path_factory.mktemp("media")
    for number, label in enumerate(("ball", "grid.2")):
        (folder / label).mkdir()
        for name, codec in (("a.mp4", "libx264 -g 12"), ("b.mkv", "mpeg4 -bf 2 -g 12")):
            ffmpeg(f"-f lavfi -i testsrc2=size=64x48:rate={20 + number}:duration=2 -c:v {codec} {label}/{name}", folder)
        for name in ("a.flac", "c.mp3"):
            ffmpeg(f"-f lavfi -i sine=frequency={300 + 200 * number}:duration=1.5 {label}/{name}", folder)
    return folder


@pytest.fixture(scope="module")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards = tmp_path_factory.mktemp("shards")
    packed(folder, shards, "--no-shuffle", "--shard-size", "2")
    assert len(list(shards.glob("*.tar"))) > 1
    return shards


def epoch(data: Any, **settings: Any) -> list[dict[str, torch.Tensor]]:
    with fl.DataLoader(data, 3, shuffle=True, seed=4, **settings) as loader:
        return list(loader)


def check_same(ours: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert [each.keys() for each in ours] == [each.keys() for each in expected]
    for one, other in zip(ours, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "process"}])
def test_clips_and_ranges_of_shards_are_those_of_the_folder(
    folder: Path, shards: Path, tmp_path: Path, workers: dict[str, Any]
) -> None:
    for kind, settings in ((Clips, {"frames": 4, "clips_per_file": 3}), (Waveforms, {"seconds": 0.3})):
        ours, theirs = (kind(place, index_dir=tmp_path, **settings) for place in (shards, folder))
        assert ours.classes == theirs.classes == ["ball", "grid.2"]
        assert ours.targets == theirs.targets
        assert (len(ours), ours.shard_sizes.tolist()) == (len(theirs), theirs.shard_sizes.tolist())
        check_same(epoch(ours, **workers), epoch(theirs))
        check_same(epoch(pickle.loads(pickle.dumps(ours))), epoch(theirs))
    assert [Path(path).suffix for path in ours.paths] == [".flac", ".mp3"] * 2
    assert ours.address(0)[0].endswith(".tar/ball/a.flac")


def test_shards_may_be_listed_compressed_or_in_a_store(folder: Path, shards: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"frames": 4, "index_dir": tmp_path, "cache": tmp_path / "cache"}
    expected = epoch(Clips(folder, **settings))
    tars = sorted(shards.glob("*.tar"))
    check_same(epoch(Clips(tars, **settings)), expected)
    check_same(epoch(Clips(shards / "*.tar", **settings)), expected)
    (tmp_path / "zipped").mkdir()
    for path in tars:
        (tmp_path / "zipped" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "zipped" / "classes.json").write_bytes((shards / "classes.json").read_bytes())
    check_same(epoch(Clips(tmp_path / "zipped", **settings)), expected)
    files = {f"/packed/{path.name}": path.read_bytes() for path in shards.iterdir()}
    fsspec.filesystem("memory").pipe(files)
    far = Clips("memory://packed", **settings)
    assert far.classes == ["ball", "grid.2"]
    check_same(epoch(far), expected)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def wav(value: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(800, float(value)), 8_000, format="wav")
    return file.getvalue()


def test_labels_without_class_names_are_read_from_their_members(tmp_path: Path) -> None:
    samples = {"1.wav": wav(0.25), "1.cls": b"7", "2.one.WAV": wav(0.5), "2.cls": b" 3\n", "3.txt": b"no sound"}
    data = Waveforms(write_tar(tmp_path / "a.tar", samples))
    assert (data.targets, data.classes, len(data)) == ([7, 3], [], 2)
    assert data[1]["waveform"][0, 0] == 0.5
    assert data[1]["label"] == 3
    (tmp_path / "classes.json").write_text(json.dumps(["x"]))  # names of other shards, which existed before
    assert Waveforms(tmp_path / "a.tar").targets == [7, 3]
    assert Waveforms(write_tar(tmp_path / "b.tar", {"1.wav": wav(0)}))[0].keys() == {"waveform", "seconds"}
    with pytest.raises(ArgumentError, match=r"c\.tar/2\.wav has no label, but others have one"):
        Waveforms(write_tar(tmp_path / "c.tar", {"1.wav": wav(0), "1.cls": b"1", "2.wav": wav(0)}))
    with pytest.raises(SampleError, match=r"d\.tar/1\.cls is not a number: b'cat'"):
        Waveforms(write_tar(tmp_path / "d.tar", {"1.wav": wav(0), "1.cls": b"cat"}))


def test_shards_without_media_and_damaged_members_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no members of .*a\.tar end with \.wav"):
        Waveforms(write_tar(tmp_path / "a.tar", {"1.txt": b"text"}))
    data = Waveforms(write_tar(tmp_path / "b.tar", {"1.wav": b"no sound" * 99, "2.wav": wav(0.5)}))
    with pytest.raises(SampleError, match=r"b\.tar/1\.wav cannot be decoded"):
        data[0]
    assert data[1]["waveform"][0, 0] == 0.5


def test_a_shard_that_is_written_again_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.wav": wav(0.5)})
    data = Waveforms(path)
    write_tar(path, {"1.wav": wav(0.25), "2.wav": wav(0)})
    with pytest.raises(StateError, match=r"a\.tar"):
        data[0]
