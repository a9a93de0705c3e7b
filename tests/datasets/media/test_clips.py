from __future__ import annotations

import contextlib
import functools
import http.server
import os
import pickle
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pytest
import torch
from media_files import ffmpeg, write_video, write_videos

import feedline as fl
from feedline.core.rng import Draws
from feedline.datasets import Clips
from feedline.datasets.media.frame_table import scan_frames
from feedline.datasets.media.sampling import ClipRule, FrameTimes, TooShortError
from feedline.datasets.media.video import VideoReader
from feedline.errors import ArgumentError, SampleError, StateError

CROP = fl.transforms.Compose([fl.transforms.RandomResizedCrop(32), fl.transforms.RandomHorizontalFlip()])


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    write_videos(folder)
    return folder


@cache
def reference(path: Path) -> dict[float, Any]:
    """All frames of a video by their time, as PyAV decodes them from the beginning."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
        return {float(f.pts * f.time_base): np.rot90(f.to_ndarray(format="rgb24"), f.rotation // 90) for f in frames}


@pytest.mark.parametrize("settings", [{"stride": 3}, {"fps": 7.0}])
def test_frames_are_those_that_decoding_from_the_beginning_shows(
    videos: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for path in sorted(videos.iterdir()):
        frames = reference(path)
        times = np.array(sorted(frames))
        clips = Clips(path, frames=4, clips_per_file=12, index_dir=tmp_path, **settings)
        torch.manual_seed(0)
        for clip in (clips[number] for number in range(12)):
            assert clip["frames"].dtype == torch.uint8
            for pixels, second in zip(clip["frames"], clip["seconds"].tolist(), strict=True):
                assert np.array_equal(pixels.permute(1, 2, 0), frames[second]), (path.name, second)
            if "fps" in settings:
                shown = clip["seconds"][0].item() + np.arange(4) / 7
                assert np.all(np.abs(clip["seconds"].numpy() - shown) <= np.diff(times).max() + 1e-6)


def test_a_subclass_that_overrides_one_clip_is_called_for_each(videos: Path, tmp_path: Path) -> None:
    class WithNumber(Clips):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "number": index}

    settings: dict[str, Any] = {"frames": 2, "clips_per_file": 3, "transform": CROP, "index_dir": tmp_path}
    plain, numbered = Clips(videos / "h264.mp4", **settings), WithNumber(videos / "h264.mp4", **settings)
    assert plain.traits.reads_batches
    assert not numbered.traits.reads_batches
    [batch], [expected] = fl.DataLoader(numbered, batch_size=3, seed=1), fl.DataLoader(plain, batch_size=3, seed=1)
    assert batch.pop("number").tolist() == [0, 1, 2]
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_all_workers_give_the_same_clips_also_after_a_resume(videos: Path, tmp_path: Path) -> None:
    names = ["h264.mp4", "hevc.mp4", "vp9.webm"]
    clips = Clips([videos / name for name in names], frames=4, clips_per_file=4, transform=CROP, index_dir=tmp_path)

    def epoch(**settings: Any) -> list[dict[str, torch.Tensor]]:
        with fl.DataLoader(clips, 3, shuffle=True, seed=1, **settings) as loader:
            return list(loader)

    expected = epoch()
    assert expected[0]["frames"].shape == (3, 4, 3, 32, 32)
    for settings in [
        {"num_workers": 2},
        {"num_workers": 2, "worker_method": "thread"},
        {"collate_fn": torch.utils.data.default_collate},
    ]:
        for ours, theirs in zip(epoch(**settings), expected, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), settings
    with fl.DataLoader(clips, 3, shuffle=True, seed=1) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with fl.DataLoader(clips, 3, shuffle=True, seed=1, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(iter(loader))["frames"], expected[1]["frames"])


def test_videos_of_one_size_make_batches_and_others_are_named(videos: Path, tmp_path: Path) -> None:
    names = ["h264.mp4", "vp9.webm"]
    clips = Clips([videos / name for name in names], frames=3, clips_per_file=2, index_dir=tmp_path)
    assert clips.traits.reads_batches
    with fl.DataLoader(clips, 4, seed=2) as ours, fl.DataLoader(clips, 4, seed=2, collate_fn=list) as samples:
        (batch,), (each,) = ours, samples
    for name in ("frames", "seconds"):
        assert torch.equal(batch[name], torch.stack([sample[name] for sample in each]))
    ffmpeg(f"-i {videos / 'h264.mp4'} -vf scale=48:32 small.mp4", tmp_path)
    assert not Clips([videos / "h264.mp4", tmp_path / "small.mp4"], frames=3, index_dir=tmp_path).traits.reads_batches
    turned = Clips([videos / "h264.mp4", videos / "turned.mp4"], frames=3, index_dir=tmp_path)
    with (
        pytest.raises(
            SampleError, match=r"turned\.mp4: its frames are 96 × 64 pixels, those of another clip.* 64 × 96"
        ),
        fl.DataLoader(turned, 2) as loader,
    ):
        next(iter(loader))


def test_all_frames_of_a_clip_get_one_crop(videos: Path, tmp_path: Path) -> None:
    rows = [{"path": "h264.mp4", "start": 0.5, "stop": 0.52}]
    clips = Clips(videos, manifest=rows, frames=3, short="repeat_last", transform=CROP, index_dir=tmp_path)
    frames = clips[0]["frames"]
    assert torch.equal(frames[0], frames[1])
    assert torch.equal(frames[0], frames[2])


def _as_float_array(image: Any) -> Any:
    return np.asarray(image, np.float32) / 255


@pytest.mark.parametrize(
    "last",
    [
        fl.transforms.ToTensor(),
        fl.transforms.ToTensor(layout="HWC"),
        fl.transforms.ToTensor(torch.uint8),
        fl.transforms.ToTensor(torch.uint8, layout="HWC"),
        fl.transforms.RandomHorizontalFlip(0),
        lambda image: image,
        lambda image: torch.from_numpy(np.array(image)).movedim(-1, 0),
        _as_float_array,
    ],
    ids=["float", "float-HWC", "uint8", "uint8-HWC", "levels", "Pillow", "tensor", "array"],
)
def test_channels_of_transformed_frames_come_first_in_any_layout(videos: Path, tmp_path: Path, last: Any) -> None:
    settings: dict[str, Any] = {"frames": 2, "sampling": "regular", "index_dir": tmp_path}
    parts = [fl.transforms.CenterCrop((20, 28)), last]
    sized = Clips(videos / "h264.mp4", transform=fl.transforms.Compose(parts), **settings)
    whole = Clips(videos / "h264.mp4", transform=fl.transforms.Compose(parts[1:]), **settings)
    plain = Clips(videos / "h264.mp4", **settings)[0]["frames"]
    [batch] = fl.DataLoader(sized, 1)
    for frames in (sized[0]["frames"], batch["frames"][0], whole[0]["frames"][..., 22:42, 34:62]):
        levels = frames * 255 if frames.is_floating_point() else frames
        assert torch.equal(levels.round().to(torch.uint8), plain[..., 22:42, 34:62])


@pytest.mark.parametrize("settings", [{"sampling": "sliding", "step": 2}, {"clips_per_file": 3}])
def test_overlapping_clips_do_not_share_what_a_transform_writes(
    videos: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    rows = [{"path": "h264.mp4", "start": 0.5, "stop": 0.8}]
    given: dict[str, Any] = {"manifest": rows, "frames": 4, "index_dir": tmp_path, **settings}
    clips, plain = Clips(videos, transform=lambda frames: frames.add_(100), **given), Clips(videos, **given)
    each, together, unchanged = (
        [clip["frames"] for batch in fl.DataLoader(data, size, seed=1, collate_fn=list) for clip in batch]
        for data, size in [(clips, 1), (clips, len(clips)), (plain, 1)]
    )
    for alone, joint, frames in zip(each, together, unchanged, strict=True):
        assert torch.equal(alone, frames + 100)
        assert torch.equal(joint, alone)


def test_a_fork_decodes_by_itself(videos: Path, tmp_path: Path) -> None:
    clips = Clips(videos / "h264.mp4", frames=2, sampling="regular", clips_per_file=5, index_dir=tmp_path)
    first = clips[3]["frames"]
    child = os.fork()
    if not child:  # NumPy compares: a fork has none of the threads that torch may use for it
        os._exit(0 if np.array_equal(clips[3]["frames"].numpy(), first.numpy()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(clips[3]["frames"], first)
    assert torch.equal(pickle.loads(pickle.dumps(clips))[3]["frames"], first)


def test_few_decoders_stay_open(videos: Path, tmp_path: Path) -> None:
    clips = Clips(sorted(videos.glob("*.mp4")), frames=2, open_files=2, index_dir=tmp_path)
    before = threading.active_count()
    clips.__getitems__(range(len(clips)))
    assert clips._decoders.open_count() == 2
    assert threading.active_count() == before


def test_labels_come_from_folders_or_from_a_manifest(videos: Path, tmp_path: Path) -> None:
    for label in ["b", "a"]:
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.MP4").write_bytes((videos / "h264.mp4").read_bytes())
    clips = Clips(tmp_path, frames=2, index_dir=tmp_path)
    assert (clips.classes, clips.targets, clips[1]["label"]) == (["a", "b"], [0, 1], 1)
    rows = [{"path": "b/x.MP4", "label": "z", "start": 1.0, "stop": 1.5}, {"path": "a/x.MP4", "label": "y"}]
    parts = Clips(tmp_path, manifest=rows, frames=4, sampling="sliding", index_dir=tmp_path)
    assert (parts.classes, parts.shard_sizes.tolist()) == (["y", "z"], [3, 15])
    assert parts[0]["seconds"].tolist() == pytest.approx([1, 1 + 1 / 30, 1 + 2 / 30, 1.1])
    assert parts.address(4)[1] == "clip 1"
    (tmp_path / "c.mp4").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"c\.mp4 is next to the class folders"):
        Clips(tmp_path, frames=2, index_dir=tmp_path)
    with pytest.raises(ArgumentError, match="row 0 of the manifest has no 'path'"):
        Clips(tmp_path, manifest=[{"file": "a"}], index_dir=tmp_path)
    for name in ("", "a", "."):
        with pytest.raises(ArgumentError, match=f"row 1 of the manifest: path='{name}' is not a file in"):
            Clips(tmp_path, manifest=[{"path": "a/x.MP4"}, {"path": name}], index_dir=tmp_path)


def test_labels_of_a_manifest_are_whole_numbers(videos: Path, tmp_path: Path) -> None:
    def labels(*given: Any) -> list[int | None]:
        rows = [{"path": "h264.mp4", "label": label} for label in given]
        return Clips(videos, manifest=rows, frames=2, index_dir=tmp_path).targets

    assert labels(np.int64(2**31), 1.0, True, -3) == [2**31, 1, 1, -3]
    for label in (1.7, float("inf"), 2**63):
        with pytest.raises(ArgumentError, match=rf"row 1 of the manifest: label={label}: give whole numbers"):
            labels(0, label)
    for given in [(0, float("nan")), ("a", float("nan")), (0, None)]:
        with pytest.raises(
            ArgumentError, match=r"row 1 of the manifest has no label \((nan|None)\): give all rows one"
        ):
            labels(*given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "x.mp4").write_bytes(b"no video" * 100), "the file is damaged or not a video"),
        (
            lambda folder: ffmpeg("-f lavfi -i sine=duration=1 -c:a aac x.mp4", folder),
            "has no video stream: remove it",
        ),
        (
            lambda folder: (write_video(folder, "x.mp4"), os.truncate(folder / "x.mp4", 9000)),
            "the file is damaged or not a video",
        ),
        (
            lambda folder: (write_video(folder, "y.264"), (folder / "y.264").rename(folder / "x.mp4")),
            "has no time stamps: add them",
        ),
        (lambda folder: write_video(folder, "x.mp4", seconds=0.2), "longer than the 6 frames"),
    ],
)
def test_a_video_that_cannot_be_read_is_named_and_can_be_skipped(
    tmp_path: Path, make: Any, message: str, videos: Path
) -> None:
    make(tmp_path)
    clips = Clips([tmp_path / "x.mp4", videos / "h264.mp4"], transform=CROP, index_dir=tmp_path / "index")
    with pytest.raises(SampleError, match=message) as caught:
        clips[0]
    assert str(tmp_path / "x.mp4") in str(caught.value)
    with fl.DataLoader(clips, 2, on_error="skip", seed=0) as loader:
        (batch,) = loader
        assert len(batch["frames"]) == 1
        assert loader.stats().skipped == 1


def test_names_may_be_any_bytes(videos: Path, tmp_path: Path) -> None:
    names = [os.fsdecode(name) for name in (b"a\xff.mkv", b"b\xff.mkv")]
    (tmp_path / names[0]).write_bytes((videos / "open-gop.mkv").read_bytes())
    (tmp_path / names[1]).write_bytes(b"no video" * 100)
    for _ in range(2):
        clips = Clips(tmp_path, frames=2, sampling="regular", index_dir=tmp_path / "index")
        assert clips[0]["frames"].shape == (2, 3, 64, 96)
        with pytest.raises(SampleError, match=r"b\udcff\.mkv"):
            clips[1]


def test_a_changed_or_lost_file_is_noticed(tmp_path: Path) -> None:
    path = write_video(tmp_path, "x.mp4", seconds=1)
    clips = Clips(path, frames=2, index_dir=tmp_path / "index")
    write_video(tmp_path, "x.mp4", seconds=2)
    with pytest.raises(StateError, match="has changed since this dataset was made"):
        clips[0]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.mp4 does not exist"):
        clips[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "no"},
        {"frames": None, "sampling": "random"},
        {"fps": 3.0, "stride": 2},
        {"sampling": "uniform", "fps": 3.0},
        {"step": 2},
        {"sampling": "sliding", "step": 0.5},
        {"sampling": "sliding", "step": float("inf")},
        {"fps": float("inf")},
        {"short": "no"},
        {"clips_per_file": 0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Clips(tmp_path, **settings)


def test_positions_of_clips() -> None:
    times = FrameTimes(np.arange(20) / 10, 2.0)

    def rule(sampling: str, frames: int | None = 4, **changes: Any) -> ClipRule:
        values = {"stride": 1, "fps": None, "per_video": 1, "step": None, "short": "error", **changes}
        return ClipRule(frames=frames, sampling=sampling, **values)

    def picked(rule: ClipRule, clip: int = 0, key: int = 0) -> list[int]:
        return rule.pick(times, clip, Draws(key)).tolist()

    assert picked(rule("regular")) == [8, 9, 10, 11]
    assert picked(rule("regular", per_video=2), 1) == [16, 17, 18, 19]
    assert picked(rule("sliding", step=3), 2) == [6, 7, 8, 9]
    assert rule("sliding").count(times) == 5
    assert rule("sliding", fps=5.0).count(times) == 2
    assert picked(rule("uniform")) == [2, 7, 12, 17]
    assert [at // 5 for at in picked(rule("segments"), key=3)] == [0, 1, 2, 3]
    assert picked(rule("whole", None, stride=7)) == [0, 7, 14]
    assert picked(rule("whole", None, fps=3.0)) == [0, 3, 6, 10, 13, 16]
    starts = {picked(rule("random", stride=5), key=key)[0] for key in range(99)}
    assert starts == {0, 1, 2, 3, 4}
    with pytest.raises(TooShortError, match="short="):
        picked(rule("random", 21))
    assert picked(rule("random", 22, short="repeat_last"))[-3:] == [19, 19, 19]
    assert picked(rule("random", 22, short="wrap"))[-3:] == [19, 0, 1]


@pytest.fixture
def server(videos: Path) -> Iterator[str]:
    with serving(videos) as address:
        yield address


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    _Ranges.asked.clear()
    handler = functools.partial(_Ranges, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Files with ranges, which the standard library's server does not support."""

    asked: ClassVar[list[tuple[int, int]]] = []

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
        self.asked.append((start, stop))
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header(
            "Last-Modified", self.date_time_string(int(Path(self.translate_path(self.path)).stat().st_mtime))
        )
        self.end_headers()
        self.wfile.write(data[start:stop])

    def log_message(self, *_: Any) -> None:
        pass


def test_objects_are_read_by_ranges(videos: Path, server: str, tmp_path: Path) -> None:
    names = ["h264.mp4", "vp9.webm"]
    settings: dict[str, Any] = {"frames": 4, "sampling": "regular", "clips_per_file": 3, "index_dir": tmp_path}
    near = Clips([videos / name for name in names], **settings)
    far = Clips([f"{server}/{name}" for name in names], options={"allow_http": True}, **settings)
    for number in range(6):
        assert torch.equal(far[number]["frames"], near[number]["frames"])


@pytest.mark.parametrize("name", ["large.mp4", "large.mkv"])
def test_a_clip_of_a_large_object_is_one_request_for_its_bytes(name: str, tmp_path: Path) -> None:
    noise = "-f lavfi -i testsrc2=size=192x144:rate=30:duration=4,noise=alls=80:allf=t -c:v mpeg4 -q:v 1 -g 10"
    ffmpeg(f"{noise} {name}", tmp_path)
    with av.open(str(tmp_path / name)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    settings: dict[str, Any] = {"frames": 6, "sampling": "regular", "clips_per_file": 5, "index_dir": tmp_path}
    near = Clips(tmp_path / name, **settings)
    with serving(tmp_path) as address:
        far = Clips(f"{address}/{name}", options={"allow_http": True}, **settings)
        far[4]  # opens the file: its header and its index
        for number in (2, 0, 3):
            _Ranges.asked.clear()
            clip = far[number]
            assert torch.equal(clip["frames"], near[number]["frames"])
            ((start, stop),) = set(_Ranges.asked)  # on a slow machine, a request may come twice
            first, last = (round(second * 30) for second in clip["seconds"][[0, -1]].tolist())
            needed = packets[first - first % 10 : last + 1]
            assert start <= needed[0].pos
            assert stop >= needed[-1].pos + needed[-1].size
            behind = sum(packet.size for packet in packets[last + 1 : last + 5])
            assert stop - start <= sum(packet.size for packet in needed) + behind + 2 * (64 << 10) + (4 << 10)


class _CountingContainer:
    """A container that counts packets and seeks."""

    def __init__(self, container: Any) -> None:
        self.container, self.packets, self.seeks = container, 0, 0

    def demux(self, stream: Any) -> Iterator[Any]:
        for packet in self.container.demux(stream):
            self.packets += 1
            yield packet

    def seek(self, place: int, stream: Any) -> None:
        self.seeks += 1
        self.container.seek(place, stream=stream)

    def close(self) -> None:
        self.container.close()


@pytest.mark.parametrize("name", ["h264.mp4", "mpeg4.mp4", "vp9.webm"])
def test_no_packet_behind_the_last_needed_one_is_decoded(videos: Path, name: str) -> None:
    path = str(videos / name)
    table, frames = scan_frames(path, name), reference(videos / name)
    reader = VideoReader(path, table, name)
    reader._video.container = counting = _CountingContainer(reader._video.container)
    for number in range(len(table.pts)):
        counting.packets = 0
        [(_, pixels)] = reader.read(np.array([number]))
        assert np.array_equal(pixels, frames[table.seconds[number]])
        key = np.searchsorted(table.keyframes, table.pts[number], "right") - 1
        assert counting.packets <= table.order[number] - table.key_order[key] + 1
    reader.close()


def test_frames_that_are_far_apart_are_read_by_seeks_and_near_ones_without(videos: Path) -> None:
    path = str(videos / "h264.mp4")
    table, frames = scan_frames(path, "h264.mp4"), reference(videos / "h264.mp4")
    reader = VideoReader(path, table, "h264.mp4")
    reader._video.container = counting = _CountingContainer(reader._video.container)

    def check(wanted: list[int], seeks: int, then: int | None = None) -> None:
        counting.seeks = 0
        for number, pixels in reader.read(np.array(wanted, np.int64), then):
            assert np.array_equal(pixels, frames[table.seconds[number]]), number
        assert counting.seeks == seeks, wanted

    check([], 0)
    check([1, 3, 4, 30, 31, 55], 3)
    check([30], 1, then=31)
    check([31, 33, 34], 0, then=40)
    check([36, 37], 1, then=36)
    check([40, 41], 1, then=len(table.pts))
    check([42], 1)
    reader.close()
