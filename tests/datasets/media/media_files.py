"""Small media files of many kinds, made by FFmpeg once per test run."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

_X264 = "-c:v libx264 -preset ultrafast -g 12 -x264-params bframes=3:scenecut=0:threads=1"

VIDEOS = {
    "h264.mp4": _X264,
    "open-gop.mkv": f"{_X264}:open-gop=1",
    "open-gop.ts": f"{_X264}:open-gop=1",
    "hevc.mp4": "-c:v libx265 -preset ultrafast -x265-params log-level=0:open-gop=1:keyint=12:bframes=3:pools=1",
    "vp9.webm": "-c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 12",
    "av1.mp4": "-c:v libaom-av1 -cpu-used 8 -usage realtime -g 12",
    "mpeg4.avi": "-c:v mpeg4 -bf 2 -g 12",
    "mpeg4.mp4": "-c:v mpeg4 -bf 2 -g 12",
    "variable.mp4": f"-vf select='not(mod(n\\,7)*mod(n\\,5))+gt(n\\,40)' -vsync vfr {_X264}",
}


def ffmpeg(arguments: str, folder: Path) -> None:
    subprocess.run(
        ["/bin/sh", "-c", f"ffmpeg -nostdin -loglevel error -y {arguments}"], cwd=folder, check=True, timeout=120
    )


def write_video(folder: Path, name: str, settings: str = _X264, seconds: float = 2) -> Path:
    """Write a video of 30 frames a second, 96 pixels wide and 64 high."""
    ffmpeg(f"-f lavfi -i testsrc2=size=96x64:rate=30:duration={seconds} {settings} {name}", folder)
    return folder / name


def write_videos(folder: Path) -> list[str]:
    """Write all of `VIDEOS`, two cuts of one, and one to be shown turned; their names."""
    for name, settings in VIDEOS.items():
        write_video(folder, name, settings)
    ffmpeg("-i open-gop.mkv -ss 0.7 -c copy cut-behind.mp4", folder)
    ffmpeg("-ss 0.7 -i open-gop.mkv -c copy cut-before.mp4", folder)
    (folder / "turned.mp4").write_bytes(_turned((folder / "h264.mp4").read_bytes()))
    return [*VIDEOS, "cut-behind.mp4", "cut-before.mp4", "turned.mp4"]


def _turned(video: bytes) -> bytes:
    """An MP4 file to be shown turned by 90 degrees; FFmpeg's option for that depends on its version."""
    matrix = video.index(b"tkhd") + 44
    assert video[matrix : matrix + 20] == struct.pack(">5i", 1 << 16, 0, 0, 0, 1 << 16)
    return video[:matrix] + struct.pack(">5i", 0, 1 << 16, 0, -1 << 16, 0) + video[matrix + 20 :]


SOUNDS = {
    "a.wav": "",
    "a.flac": "",
    "a.ogg": "-c:a libvorbis",
    "a.mp3": "-c:a libmp3lame",
    "a.opus": "-c:a libopus -ar 48000",
}


def write_sounds(folder: Path) -> list[str]:
    """Write three seconds of two channels in each format; their names."""
    tones = "0.4*sin(2*PI*(200+40*t)*t)|0.3*sin(2*PI*300*t)+0.1*random(0)"
    for name, settings in SOUNDS.items():
        ffmpeg(f"-f lavfi -i \"aevalsrc='{tones}':s=44100:d=3\" {settings} {name}", folder)
    return [*SOUNDS]
