"""Audio files that are incomplete or joined: libsndfile reads a part of them, and reports nothing."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
from diagonals import diagonal_by_day
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_files import ffmpeg, write_sounds

import feedline as fl
from feedline.datasets import Waveforms
from feedline.datasets.media.audio_checks import check_whole
from feedline.errors import SampleError

RATE, LENGTH = 8_000, 3_001


def sound(container: str, coding: str = "PCM_16") -> bytes:
    """A file of one channel, with an odd number of samples."""
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, LENGTH), RATE, format=container, subtype=coding)
    return file.getvalue()


def whole(path: Path | str, folder: Path) -> Any:
    return Waveforms(path, channels=None, index_dir=folder)[0]["waveform"].numpy()


WITH_SIZES = {
    **{("WAV", coding): "wav" for coding in ("PCM_16", "PCM_24", "PCM_U8", "FLOAT", "ULAW", "IMA_ADPCM", "MS_ADPCM")},
    **dict.fromkeys([("WAV", "GSM610"), ("WAVEX", "PCM_16"), ("RF64", "PCM_16"), ("NIST", "PCM_16")], "wav"),
    **dict.fromkeys([("AIFF", "PCM_16"), ("AIFF", "FLOAT"), ("AIFF", "IMA_ADPCM")], "aiff"),
    ("W64", "PCM_16"): "w64",
    ("CAF", "PCM_16"): "caf",
    ("AU", "PCM_16"): "au",
    ("AU", "ULAW"): "au",
}
"""Containers that declare the bytes of their sound, and codings."""

FILES = {
    **{key: sound(*key) for key in WITH_SIZES},
    **{("OGG", coding): sound("OGG", coding) for coding in ("VORBIS", "OPUS")},
    ("FLAC", "PCM_16"): sound("FLAC"),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FILES)), st.integers(1, 1 << 20), st.booleans())
def test_a_file_cut_anywhere_is_an_error_or_all_of_its_sound(
    tmp_path: Path, kind: tuple[str, str], cut: int, is_short: bool
) -> None:
    data = FILES[kind]
    left = data[: len(data) - 1 - cut % (40 if is_short else len(data) - 1)]
    (path := tmp_path / "a.wav").write_bytes(left)
    with suppress(SampleError):
        found = whole(path, tmp_path)
        path.write_bytes(data)
        assert np.array_equal(found, whole(path, tmp_path)), "without padding, or chunks after the sound"


def at_end_of_sound(kind: tuple[str, str]) -> int:
    """The byte behind the sound."""
    data = FILES[kind]
    try:
        for nbytes in range(len(data) - 1, 0, -1):
            check_whole(io.BytesIO(data[:nbytes]), "")
    except SampleError:
        return nbytes + 1
    raise AssertionError


@pytest.mark.parametrize("kind", WITH_SIZES, ids="-".join)
def test_a_truncated_file_is_named_with_both_lengths(tmp_path: Path, kind: tuple[str, str]) -> None:
    end = at_end_of_sound(kind)
    assert len(FILES[kind]) - end <= 8, "padding"
    good, bad = tmp_path / f"a.{WITH_SIZES[kind]}", tmp_path / f"b.{WITH_SIZES[kind]}"
    good.write_bytes(FILES["WAV", "PCM_16"])
    bad.write_bytes(FILES[kind][: end - 300])
    data = Waveforms([good, bad], seconds=0.01, index_dir=tmp_path)
    with pytest.raises(SampleError) as caught:
        data[1]
    declared, present = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert present == declared - 300
    for words in (f"{bad} is truncated", "Copy it again", "on_error='skip'"):
        assert words in str(caught.value)
    with fl.DataLoader(data, 2, on_error="skip") as loader:
        assert [len(batch["waveform"]) for batch in loader] == [1]
        assert loader.stats().skipped == 1


def test_a_truncated_object_is_named(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/cut/a.wav", FILES["WAV", "PCM_16"][:2000])
    with pytest.raises(SampleError, match=r"memory://cut/a\.wav is truncated: its header declares 6002 bytes .* 1956"):
        whole("memory://cut/a.wav", tmp_path)
    system.rm("/cut", recursive=True)


OPEN = [0, 0x7F00_0008, 0x7FFF_0000, 0x7FFF_F000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_0000, 0xFFFF_FFFF]

LARGE_OPEN = [0, (1 << 63) - 1, (1 << 64) - 1]

FIELDS = {
    **{("WAV", coding): (FILES["WAV", coding].index(b"data") + 4, "<I") for coding in ("PCM_16", "MS_ADPCM")},
    ("AIFF", "PCM_16"): (FILES["AIFF", "PCM_16"].index(b"SSND") + 4, ">I"),
    ("AU", "PCM_16"): (8, ">I"),
    ("RF64", "PCM_16"): (28, "<Q"),
    ("W64", "PCM_16"): (FILES["W64", "PCM_16"].index(b"data") + 16, "<Q"),
    ("CAF", "PCM_16"): (FILES["CAF", "PCM_16"].index(b"data") + 4, ">Q"),
}
"""Place and format of the size of the sound."""


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [(kind, size) for kind, (_, form) in FIELDS.items() for size in (OPEN if form[1] == "I" else LARGE_OPEN)],
    ids=str,
)
def test_a_size_that_was_left_open_means_the_rest_of_the_file(
    tmp_path: Path, kind: tuple[str, str], nbytes: int
) -> None:
    data, (at, form) = bytearray(FILES[kind]), FIELDS[kind]
    struct.pack_into(form, data, at, nbytes)
    if kind[0] in ("WAV", "AIFF"):
        struct.pack_into(form, data, 4, max(nbytes, 36))
    (tmp_path / "a.wav").write_bytes(data)
    (tmp_path / "b.wav").write_bytes(FILES[kind])
    assert np.array_equal(whole(tmp_path / "a.wav", tmp_path), whole(tmp_path / "b.wav", tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        *("-f wav", "-c:a pcm_s24le -f wav", "-c:a pcm_mulaw -f wav", "-c:a adpcm_ms -f wav", "-rf64 always -f wav"),
        *("-f au", "-f aiff", "-f w64", "-f caf"),
    ],
)
def test_files_that_were_written_into_a_pipe_are_read_to_their_end(tmp_path: Path, settings: str) -> None:
    write = f"-f lavfi -i aevalsrc='0.3*sin(900*t)|0.2*sin(700*t)':s=44100:d=0.5 {settings}"
    ffmpeg(f"{write} - > a.wav", tmp_path)
    ffmpeg(f"{write} b.wav", tmp_path)
    found = whole(tmp_path / "a.wav", tmp_path)
    assert found.shape[1] >= 22_000
    assert np.array_equal(found, whole(tmp_path / "b.wav", tmp_path))


@pytest.mark.parametrize("nbytes", [9, 10, 4096])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("magic", [b"RIFF", b"RIFX"])
def test_other_chunks_are_no_sound(tmp_path: Path, magic: bytes, nbytes: int, is_before: bool) -> None:
    order = "<" if magic == b"RIFF" else ">"

    def chunk(name: bytes, data: bytes) -> bytes:
        return name + struct.pack(f"{order}I", len(data)) + data + bytes(len(data) % 2)

    other = chunk(b"note", b"data" * (nbytes // 4) + bytes(nbytes % 4))
    form = chunk(b"fmt ", struct.pack(f"{order}HHIIHH", 1, 1, RATE, RATE, 1, 8))
    parts = [form, other, chunk(b"data", bytes(range(1, 256)))] if is_before else [form, chunk(b"data", bytes(255))]
    content = b"WAVE" + b"".join([*parts, other])
    file = magic + struct.pack(f"{order}I", len(content)) + content
    (tmp_path / "a.wav").write_bytes(file)
    assert whole(tmp_path / "a.wav", tmp_path).shape == (1, 255)
    (tmp_path / "a.wav").write_bytes(file[: -len(other)])
    assert whole(tmp_path / "a.wav", tmp_path).shape == (1, 255)
    (tmp_path / "a.wav").write_bytes(file[: -len(other) - 2])
    with pytest.raises(SampleError, match="declares 255 bytes of sound, but 254 are there"):
        whole(tmp_path / "a.wav", tmp_path)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    write_sounds(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "tag"), diagonal_by_day(["a.ogg", "a.opus", "a.mp3"], [b"", b"TAG".ljust(128, b"\xff")])
)
def test_files_behind_a_file_are_named(sounds: Path, tmp_path: Path, name: str, tag: bytes) -> None:
    """As `cat` joins them, and as radio streams are recorded."""
    data = (sounds / name).read_bytes()
    (tmp_path / name).write_bytes(data + tag)
    assert np.array_equal(whole(tmp_path / name, tmp_path), whole(sounds / name, tmp_path))
    number = "" if name == "a.mp3" else "-serial_offset 7"  # two recordings do not have one stream number
    ffmpeg(f"-i {sounds / name} -c copy {number} next-{name}", tmp_path)
    (tmp_path / name).write_bytes(data + tag + (tmp_path / f"next-{name}").read_bytes())
    with pytest.raises(SampleError, match=r"contains several files, one behind the other.*ffmpeg -i .* out\.flac"):
        whole(tmp_path / name, tmp_path)
    ffmpeg(f"-i {name} out.flac", tmp_path)
    assert whole(tmp_path / "out.flac", tmp_path).shape[1] > 1.8 * whole(sounds / name, tmp_path).shape[1]


@pytest.mark.parametrize("name", ["a.ogg", "a.opus"])
def test_ogg_that_ends_within_a_page_is_truncated(sounds: Path, tmp_path: Path, name: str) -> None:
    data = (sounds / name).read_bytes()
    last = data.rindex(b"OggS")
    for nbytes in (last - 1, last + 3, last + 20, len(data) - 1):
        (tmp_path / name).write_bytes(data[:nbytes])
        with pytest.raises(SampleError, match=f"{name} is truncated: its last page is not whole"):
            whole(tmp_path / name, tmp_path)
    ffmpeg(f"-i {name} -c copy b{name}", tmp_path)
    assert whole(tmp_path / f"b{name}", tmp_path).shape[1] > 80_000


@pytest.mark.parametrize("name", ["a.ogg", "a.opus"])
def test_ogg_that_does_not_mark_its_end_is_read(sounds: Path, tmp_path: Path, name: str) -> None:
    """A recorder that is stopped writes whole pages, none of them marked as the last one."""
    data = (sounds / name).read_bytes()
    (tmp_path / name).write_bytes(data[: data.rindex(b"OggS")])
    samples = soundfile.info(tmp_path / name).frames
    assert whole(tmp_path / name, tmp_path).shape[1] == samples > 80_000


@pytest.mark.parametrize("container", ["WAV", "AIFF", "AU", "W64"])
def test_a_file_without_sound_is_named(tmp_path: Path, container: str) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), RATE, format=container, subtype="PCM_16")
    with pytest.raises(SampleError, match=r"a\.wav has no samples: its header declares none"):
        whole(tmp_path / "a.wav", tmp_path)
