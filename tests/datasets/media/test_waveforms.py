from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
import torch
from media_files import ffmpeg, write_sounds
from peers import torchaudio

import feedline as fl
from feedline.datasets import Waveforms
from feedline.datasets.media.audio import AudioReader
from feedline.errors import ArgumentError, MissingExtraError, SampleError


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    write_sounds(folder)
    return folder


def test_ranges_are_slices_of_the_whole(sounds: Path, tmp_path: Path) -> None:
    for path in sorted(sounds.iterdir()):
        whole, rate = soundfile.read(path, dtype="float32", always_2d=True)
        ranges = Waveforms(path, seconds=0.25, clips_per_file=12, channels=None, index_dir=tmp_path)
        torch.manual_seed(0)
        for sample in (ranges[number] for number in range(12)):
            start = round(sample["seconds"] * rate)
            expected = whole[start : start + round(0.25 * rate)].T
            assert np.array_equal(sample["waveform"].numpy(), expected), path.name


@pytest.mark.parametrize("settings", ["-b:a 32k", "-ac 1 -ar 48000 -q:a 9", "-ar 22050", "-c:a mp2 -f mp2"])
def test_ranges_of_mpeg_files_depend_on_nothing_that_was_read_before(tmp_path: Path, settings: str) -> None:
    """After libsndfile's seek, they are up to half of full scale off, depending on the state of its decoder."""
    ffmpeg(f"-f lavfi -i sine=frequency=300:duration=4 {settings} a.mp3", tmp_path)
    whole, _ = soundfile.read(tmp_path / "a.mp3", dtype="float32", always_2d=True)
    info = soundfile.info(tmp_path / "a.mp3")
    starts = np.random.default_rng(0).integers(0, len(whole) - 3000, 100).tolist()
    used = AudioReader(str(tmp_path / "a.mp3"), "a.mp3")
    for start in [*starts, starts[-1] + 3000]:
        found = used.read(start, start + 3000)
        # The filters of rates below 32 kHz round in another order after a seek.
        assert np.abs(found - whole[start : start + 3000].T).max(initial=0) <= (
            0 if info.samplerate >= 32_000 else 2e-7
        )
        fresh = AudioReader(str(tmp_path / "a.mp3"), "a.mp3")
        assert np.array_equal(fresh.read(start, start + 3000), found)
        fresh.close()
    used.close()


@pytest.mark.parametrize("settings", ["-b:a 128k", "-q:a 4", "-ar 16000 -ac 1 -id3v2_version 4 -metadata title=x"])
def test_mp3_files_that_do_not_state_their_length(tmp_path: Path, settings: str) -> None:
    """libsndfile estimates it from the first frame: too many samples, or a sixth of a variable bit rate."""
    ffmpeg(f"-f lavfi -i aevalsrc='0.5*sin(3000*t*t):s=44100:d=3' {settings} -write_xing 0 a.mp3", tmp_path)
    ffmpeg("-i a.mp3 -f f32le -c:a pcm_f32le a.pcm", tmp_path)
    data = (tmp_path / "a.mp3").read_bytes() + b"TAG".ljust(128, b"\0")  # a tag at the end is no sound
    (tmp_path / "a.mp3").write_bytes(data)
    system = fsspec.filesystem("memory")
    system.pipe("/mpeg/a.mp3", data)
    expected = torch.from_numpy(np.fromfile(tmp_path / "a.pcm", np.float32))
    rate = soundfile.info(tmp_path / "a.mp3").samplerate
    for place in (tmp_path / "a.mp3", "memory://mpeg/a.mp3"):
        whole = Waveforms(place, index_dir=tmp_path)[0]["waveform"][0]
        assert whole.shape == expected.shape
        assert torch.allclose(whole, expected, atol=1e-5)
        parts = Waveforms(place, seconds=0.5, sampling="sliding", index_dir=tmp_path)
        for sample in (parts[len(parts) - 1], parts[0], parts[2]):
            start = round(sample["seconds"] * rate)
            assert torch.equal(sample["waveform"][0], whole[start : start + rate // 2])
    system.rm("/mpeg", recursive=True)


def test_flac_that_does_not_state_its_length_is_named(tmp_path: Path) -> None:
    """FFmpeg cannot write it into the header at the beginning of a pipe."""
    ffmpeg("-f lavfi -i sine=duration=1 -f flac - > a.flac", tmp_path)
    with pytest.raises(SampleError, match=r"a\.flac does not state its length.*write it again"):
        Waveforms(tmp_path / "a.flac", index_dir=tmp_path)[0]
    ffmpeg("-i a.flac b.flac", tmp_path)
    assert Waveforms(tmp_path / "b.flac", index_dir=tmp_path)[0]["waveform"].shape == (1, 44_100)


def test_samples_without_a_header_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(bytes(1000))
    with pytest.raises(SampleError, match=r"a\.raw has samples without a header: write it with one"):
        Waveforms(tmp_path / "a.raw", index_dir=tmp_path)[0]


def test_few_files_stay_open(sounds: Path, tmp_path: Path) -> None:
    data = Waveforms(sounds, seconds=0.25, open_files=2, index_dir=tmp_path)
    assert len(data) > 2
    data.__getitems__(range(len(data)))
    assert data._decoders.open_count() == 2


def test_all_workers_give_the_same_ranges(sounds: Path, tmp_path: Path) -> None:
    data = Waveforms(sounds, seconds=0.5, rate=16_000, clips_per_file=3, index_dir=tmp_path)

    def epoch(**settings: Any) -> list[dict[str, torch.Tensor]]:
        with fl.DataLoader(data, 4, shuffle=True, seed=1, **settings) as loader:
            return list(loader)

    expected = epoch()
    assert expected[0]["waveform"].shape == (4, 1, 8_000)
    for settings in [{"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}]:
        for ours, theirs in zip(epoch(**settings), expected, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), settings


def test_mel_spectrograms_are_torchaudio_s(sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(torchaudio())
    mel, rate = {"n_mels": 20, "n_fft": 256}, 16_000
    settings: dict[str, Any] = {"rate": rate, "clips_per_file": 2, "sampling": "regular", "index_dir": tmp_path}
    waveforms = Waveforms(sounds, seconds=0.25, **settings)
    spectrograms = Waveforms(sounds, seconds=0.25, mel=mel, **settings)
    filters = importlib.import_module("torchaudio.transforms").MelSpectrogram(sample_rate=rate, **mel)
    expected = [filters(sample["waveform"]) for sample in waveforms]
    assert expected[0].shape == (1, 20, 32)
    for workers in ({}, {"num_workers": 1, "worker_method": "process"}):
        with fl.DataLoader(spectrograms, 5, seed=0, **workers) as loader:
            got = torch.cat([batch["mel"] for batch in loader])
        torch.testing.assert_close(got, torch.stack(expected), msg=str(workers))
    whole = Waveforms(sounds, mel=mel, rate=rate, index_dir=tmp_path)
    with fl.DataLoader(whole, 5, collate_fn=fl.collate.pad(keys=["mel"], dim=-1)) as loader:
        values, lengths, _ = next(iter(loader))["mel"]
    assert values.shape[:3] == (5, 1, 20)
    assert lengths.tolist() == [sample["mel"].shape[-1] for sample in whole]


def test_short_files_are_padded_or_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.full((100, 2), 0.5), 8_000)
    padded = Waveforms(tmp_path / "a.wav", seconds=0.02, channels=None, index_dir=tmp_path)[0]["waveform"]
    assert padded.shape == (2, 160)
    assert (padded[:, :100] == 0.5).all()
    assert not padded[:, 100:].any()
    with pytest.raises(SampleError, match=r"a\.wav has 0\.013 s, but 0\.02 s are requested: pass pad=True"):
        Waveforms(tmp_path / "a.wav", seconds=0.02, pad=False, index_dir=tmp_path)[0]
    with pytest.raises(SampleError, match="has 2 channels, which cannot be converted to 3: pass channels=1"):
        Waveforms(tmp_path / "a.wav", channels=3, index_dir=tmp_path)[0]
    assert len(Waveforms(tmp_path / "a.wav", seconds=0.005, sampling="sliding", index_dir=tmp_path)) == 2


def test_whole_files_are_padded_along_time(tmp_path: Path) -> None:
    for number, length in enumerate([30, 50]):
        soundfile.write(tmp_path / f"{number}.wav", np.full(length, 0.25), 8_000)
    data = Waveforms(tmp_path / "*.wav", index_dir=tmp_path)
    with fl.DataLoader(data, 2, collate_fn=fl.collate.pad(keys=["waveform"], dim=-1)) as loader:
        values, lengths, mask = next(iter(loader))["waveform"]
    assert (values.shape, lengths.tolist()) == ((2, 1, 50), [30, 50])
    assert mask.sum(1).tolist() == [30, 50]
    assert values.sum().item() == 20


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound" * 99)
    with pytest.raises(SampleError, match=r"a\.wav cannot be decoded .* write it again"):
        Waveforms(tmp_path / "a.wav", index_dir=tmp_path)[0]
    soundfile.write(tmp_path / "b.wav", np.zeros(100), 8_000)
    rows = [{"path": "b.wav", "start": 9.0}]
    with pytest.raises(SampleError, match=r"b\.wav has no sample between 9 s and its end"):
        Waveforms(tmp_path, manifest=rows, index_dir=tmp_path)[0]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the files that are described."""
    numbers, own = list[int](), Waveforms._describe
    monkeypatch.setattr(Waveforms, "_describe", lambda self, number: numbers.append(number) or own(self, number))
    return numbers


def test_each_file_is_described_once_for_all_manifests_of_a_folder(tmp_path: Path, described: list[int]) -> None:
    for number in range(5):
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(100), 8_000)

    def of(*names: str) -> Waveforms:
        described.clear()
        return Waveforms(tmp_path, manifest=[{"path": name} for name in names], index_dir=tmp_path / "index")

    train = of("0.wav", "1.wav", "2.wav")
    assert len(described) == 3
    test = of("2.wav", "3.wav")
    assert described == [1]
    assert len(of("0.wav", "1.wav", "2.wav")) + len(of("2.wav", "3.wav")) == 5
    assert len([*train.__getitems__(range(3)), *test.__getitems__(range(2))]) == 5
    assert not described
    [index] = (tmp_path / "index").iterdir()
    nbytes = index.stat().st_size
    soundfile.write(tmp_path / "0.wav", np.zeros(200), 8_000)
    of("0.wav")
    assert described == [0]
    assert index.stat().st_size == nbytes  # the former version is not kept
    assert len(of("4.wav", "1.wav")[0]["waveform"][0]) == 100
    assert described == [0]


def test_an_error_of_another_library_is_not_kept(
    tmp_path: Path, described: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound" * 99)

    def described_by(version: str) -> list[int]:
        described.clear()
        monkeypatch.setattr(soundfile, "__libsndfile_version__", version)
        with pytest.raises(SampleError, match=r"^\S*a\.wav cannot be decoded"):
            Waveforms(tmp_path / "a.wav", index_dir=tmp_path / "index")[0]
        return described

    assert [len(described_by(version)) for version in ("1.2", "1.2", "1.2.2", "1.2.2")] == [1, 0, 1, 0]


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.full(100, 0.5), 8_000)
    (tmp_path / "a.wav").rename(tmp_path / os.fsdecode(b"a\xff.wav"))
    (tmp_path / os.fsdecode(b"b\xff.wav")).write_bytes(b"no sound" * 99)
    for _ in range(2):
        data = Waveforms(tmp_path, index_dir=tmp_path / "index")
        assert data[0]["waveform"].sum().item() == 50
        with pytest.raises(SampleError, match=r"b\udcff\.wav cannot be decoded"):
            data[1]


def test_missing_packages_and_wrong_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 8_000)
    for settings in [
        {"seconds": -1.0},
        {"seconds": float("inf")},
        {"sampling": "no"},
        {"sampling": "random"},
        {"step": 1.0},
        {"mel": {}},
    ]:
        with pytest.raises(ArgumentError):
            Waveforms(tmp_path / "a.wav", **settings)
    broken = tmp_path / "of-another-build" / "torchaudio.py"
    broken.parent.mkdir()
    broken.write_text("raise OSError('Could not load this library: _torchaudio.so')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(broken.parent)
        with pytest.raises(MissingExtraError, match=r"torchaudio that matches your torch.*Could not load"):
            Waveforms(tmp_path / "a.wav", rate=8_000, mel={"n_mels": 4})
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    with pytest.raises(MissingExtraError, match="pip install torchaudio"):
        Waveforms(tmp_path / "a.wav", rate=8_000, mel={"n_mels": 4})
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"feedline\[audio\]"):
        Waveforms(tmp_path / "a.wav")


def test_a_subclass_that_overrides_one_sample_is_called_for_each(sounds: Path, tmp_path: Path) -> None:
    class WithNumber(Waveforms):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "number": index}

    settings: dict[str, Any] = {"seconds": 0.25, "rate": 8_000, "sampling": "regular", "index_dir": tmp_path}
    plain, numbered = Waveforms(sounds, **settings), WithNumber(sounds, **settings)
    assert [sample["number"] for sample in numbered.__getitems__([2, 0])] == [2, 0]
    [batch] = fl.DataLoader(numbered, batch_size=len(plain))
    assert batch["number"].tolist() == list(range(len(plain)))
    [expected] = fl.DataLoader(plain, batch_size=len(plain))
    assert torch.equal(batch["waveform"], expected["waveform"])
