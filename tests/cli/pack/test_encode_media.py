"""Packing sounds, videos and text; and names that are not UTF-8."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from image_cases import jpeg
from packing_cases import feedline, members, packed

from feedline.datasets import Clips, TarShards, Waveforms
from feedline.datasets.imagefolder import listing
from feedline.datasets.media import waveforms as audio
from feedline.datasets.media.clips import VIDEO_EXTENSIONS

WAV = b"RIFF....WAVE"


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_sounds_and_videos_are_samples_with_their_texts(tmp_path: Path) -> None:
    files = {
        "dog/1.wav": WAV,
        "dog/1.txt": b"a bark",
        "cat/clip.mp4": b"video",
        "cat/clip.wav": b"its sound",
        "cat/clip.JSON": b"not found: names are compared as they are",
        "cat/clip.json": b"{}",
        "cat/notes.txt": b"belongs to nothing",
    }
    report = packed(write(tmp_path / "in", files), tmp_path / "out", "--no-shuffle")
    assert members(tmp_path / "out") == {
        "cat/clip.mp4": b"video",
        "cat/clip.wav": b"its sound",
        "cat/clip.json": b"{}",
        "cat/clip.cls": b"0",
        "dog/1.wav": WAV,
        "dog/1.txt": b"a bark",
        "dog/1.cls": b"1",
    }
    assert report["samples"] == 2
    assert any("files ending in .txt" in note for note in report["notes"])
    data = TarShards(tmp_path / "out", ("wav", "cls"))
    assert [data[0][0], data[1]] == [b"its sound", (WAV, 1)]


def test_real_videos_and_sounds_are_read_from_the_shards_as_from_their_folders(tmp_path: Path) -> None:
    """A decoder of the user's own gets the files unchanged."""
    make = "ffmpeg -nostdin -loglevel error -f lavfi -i"
    for label, rate in (("ball", 10), ("grid", 12)):
        (tmp_path / "in" / label).mkdir(parents=True)
        target = tmp_path / "in" / label / "a"
        video = f"{make} testsrc2=size=48x32:rate={rate}:duration=1 -c:v mpeg4 {target}.mp4"
        sound = f"{make} sine=frequency={40 * rate}:duration=0.2 {target}.flac"
        for command in (video, sound):
            subprocess.run(command.split(), check=True, timeout=120)
    packed(tmp_path / "in", tmp_path / "out", "--no-shuffle")

    def frames(content: bytes) -> torch.Tensor:
        with av.open(io.BytesIO(content)) as container:
            rgb = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return torch.from_numpy(np.stack(rgb)).permute(0, 3, 1, 2)

    def waveform(content: bytes) -> torch.Tensor:
        return torch.from_numpy(soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)[0].T)

    shards = TarShards(tmp_path / "out", ("mp4", "flac", "cls"), decode={"mp4": frames, "flac": waveform})
    clips = Clips(tmp_path / "in", frames=None, index_dir=tmp_path)
    sounds = Waveforms(tmp_path / "in", index_dir=tmp_path)
    assert len(shards) == len(clips) == len(sounds) == 2
    for number, (video, sound, label) in enumerate(shards[row] for row in range(2)):
        assert torch.equal(video, clips[number]["frames"])
        assert torch.equal(sound, sounds[number]["waveform"])
        assert label == clips[number]["label"] == sounds[number]["label"]


def test_all_that_clips_and_waveforms_read_from_folders_is_packed() -> None:
    readable = {extension.removeprefix(".") for extension in (*VIDEO_EXTENSIONS, *audio.AUDIO_EXTENSIONS)}
    assert readable <= listing.VIDEO_EXTENSIONS | listing.AUDIO_EXTENSIONS


def test_sounds_of_an_image_belong_to_its_sample(tmp_path: Path) -> None:
    files = {"1.jpg": jpeg(40, 40), "1.png": b"", "1.mp3": b"sound", "1.txt": b"text"}
    files["1.png"] = files["1.jpg"]
    packed(write(tmp_path / "in", files), tmp_path / "out")
    assert list(members(tmp_path / "out")) == ["1.jpg", "1.mp3", "1.txt", "1-2.png", "1-2.txt"]


def test_without_media_all_files_of_a_name_are_a_sample(tmp_path: Path) -> None:
    files = {"0001.txt": b"one", "0001.de.txt": b"eins", "0002.json": b"{}", ".hidden.txt": b"", "README": b""}
    report = packed(write(tmp_path / "in", files), tmp_path / "out")
    assert members(tmp_path / "out") == {"0001.txt": b"one", "0001_de.txt": b"eins", "0002.json": b"{}"}
    assert len(report["notes"]) == 2


def test_text_in_class_folders(tmp_path: Path) -> None:
    packed(write(tmp_path / "in", {"pos/1.txt": b"good", "neg/1.txt": b"bad"}), tmp_path / "out", "--no-shuffle")
    data = TarShards(tmp_path / "out", ("txt", "cls"))
    assert [data[0], data[1]] == [("bad", 0), ("good", 1)]


@pytest.mark.skipif(os.sep != "/", reason="names are bytes on POSIX only")
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path / "in")
    for name in (b"b", b"caf\xe9"):
        for file in (b"1.jpg", b"na\xefve.jpg"):
            path = Path(os.fsdecode(root + b"/" + name + b"/" + file))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(40, 40))
    for _ in range(2):  # the second run finds what the first one wrote
        packed(tmp_path / "in", tmp_path / "out", "--no-shuffle")
    assert [os.fsencode(name) for name in json.loads((tmp_path / "out/classes.json").read_bytes())] == [
        b"b",
        b"caf\xe9",
    ]
    data = TarShards(tmp_path / "out", ("__key__", "cls"))
    assert [(os.fsencode(key), label) for key, label in (data[i] for i in range(4))] == [
        (b"b/1", 0),
        (b"b/na\xefve", 0),
        (b"caf\xe9/1", 1),
        (b"caf\xe9/na\xefve", 1),
    ]
    assert feedline("inspect", tmp_path / "out").exit_code == 0
    assert feedline("index", "--check", tmp_path / "out").exit_code == 0
