"""Parts divide the time of their stage; outside of batches nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, sleep

import numpy as np
import pytest

from feedline.core import kernels, stage_parts, telemetry
from feedline.core.stage_parts import Part, part, read_part
from feedline.core.telemetry import Recorder, SpanTuple, new_recorder

KINDS = [(Recorder, Part), (new_recorder, part)]
"""Recorders with their parts: in Python, and native."""


def ms(spans: list[SpanTuple], stage: str) -> float:
    """Milliseconds of a stage."""
    return sum(stop - start for name, start, stop, _ in spans if name == stage) / 1e6


@pytest.mark.parametrize(("new", "part_of"), KINDS)
def test_parts_divide_the_time_of_their_stage(new: Callable[[], Recorder], part_of: Callable[[str], Part]) -> None:
    read, decode = part_of("read a"), part_of("decode")
    recorder = new()
    recorder.next_delay_ns = 1 << 62
    recorder.worker = 2
    outer = recorder.begin()
    began = monotonic_ns()
    with decode:
        assert decode.timed
        sleep(0.002)
        with read:
            sleep(0.004)
            read.count(100)
        with read:
            read.count(50)
    took_ms = (monotonic_ns() - began) / 1e6
    recorder.end("fetch")
    with decode:
        decode.count(7)
    spans = recorder.finish("collate", outer)
    fetch, collate = (next(each for each in spans if each[0] == name) for name in ("fetch", "collate"))
    reads, decodes = ([each for each in spans if each[0] == name] for name in ("read a", "decode"))
    assert (len(reads), len(decodes)) == (1, 2)
    assert {worker for *_, worker in spans} == {2}
    assert ms(spans, "read a") >= 4
    assert (decodes[0][2] - decodes[0][1]) / 1e6 >= 2
    assert ms(spans, "read a") + (decodes[0][2] - decodes[0][1]) / 1e6 <= took_ms
    assert fetch[1] == decodes[0][1] <= decodes[0][2] == reads[0][1] <= reads[0][2] <= fetch[2]
    assert collate[1] == decodes[1][1] <= decodes[1][2] <= collate[2]
    assert [stop for name, _, stop, _ in spans if name.endswith(".nbytes")] == [150, 7]
    assert 0 <= ms(spans, "read a.cpu") <= ms(spans, "read a")
    assert ("parts", fetch[1], collate[2], 2) in spans


@pytest.mark.parametrize(("new", "part_of"), KINDS)
def test_time_can_be_claimed_for_another_part(new: Callable[[], Recorder], part_of: Callable[[str], Part]) -> None:
    read, decode = part_of("read a"), part_of("decode")
    recorder = new()
    recorder.begin()
    with decode:
        sleep(0.003)
        read.claim(2_000_000, 30)
    read.claim(9_000_000, 1)
    spans = recorder.finish("fetch", None)
    assert ms(spans, "read a") == 2
    assert 1 <= ms(spans, "decode") <= ms(spans, "fetch") - 2
    assert [stop for name, _, stop, _ in spans if name == "read a.nbytes"] == [30]


@pytest.mark.parametrize(("new", "part_of"), KINDS)
def test_parts_of_a_batch_within_another_are_its_own(
    new: Callable[[], Recorder], part_of: Callable[[str], Part]
) -> None:
    decode, transform = part_of("decode"), part_of("transform")
    recorder = new()
    recorder.next_delay_ns = 1 << 62
    outer = recorder.begin()
    with decode:
        inner = recorder.begin()
        with pytest.raises(KeyError), transform:
            raise KeyError
        recorder.spans = inner  # as after an error
        inner = recorder.begin()
        with transform:
            pass
        recorder.next_parts_ns = 0
        names = [name for name, *_ in recorder.finish("fetch", inner) if not name.endswith(".cpu")]
        assert names == ["fetch", "transform", "parts"]
    with decode:
        pass
    spans = recorder.finish("fetch", outer)
    assert [name for name, *_ in spans if not name.endswith(".cpu")] == ["fetch", "decode", "parts"]
    assert not decode.timed
    with decode:
        decode.count(1)
        decode.claim(1, 1)


@pytest.mark.parametrize(("new", "part_of"), KINDS)
def test_many_parts_are_timed_in_few_batches(new: Callable[[], Recorder], part_of: Callable[[str], Part]) -> None:
    decode = part_of("decode")
    recorder = new()
    recorder.begin()
    for _ in range(1000):
        with decode:
            pass
    spans = recorder.finish("fetch", None)
    rest_ns = recorder.next_parts_ns - next(start for name, start, *_ in spans if name == "parts")
    assert rest_ns >= telemetry.REST * 2000 * telemetry.SWITCH_NS
    recorder.begin()
    with decode:
        assert not decode.timed
    assert {name for name, *_ in recorder.finish("fetch", None)} <= {"fetch", "fetch.cpu"}


@pytest.mark.parametrize(("new", "part_of"), KINDS)
def test_the_last_part_takes_those_that_are_too_many(
    new: Callable[[], Recorder], part_of: Callable[[str], Part]
) -> None:
    recorder = new()
    recorder.begin()
    for number in range(40):
        with part_of(f"read {number}"):
            pass
    spans = recorder.finish("fetch", None)
    named = [name for name, *_ in spans if name.startswith("read ") and not name.endswith(".cpu")]
    assert named == [f"read {number}" for number in range(telemetry.MOST_PARTS)]


def test_each_host_has_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_parts, "_stores", {})
    assert read_part("s3://bucket/some/folder").stage == read_part("s3://bucket").stage == "read s3://bucket"
    assert read_part("/folder").stage == "read /folder"
    for number in range(stage_parts.MOST_STORES):
        read_part(f"https://host{number}")
    assert read_part("https://further/x").stage == "read other stores"
    assert read_part("s3://bucket/other").stage == "read s3://bucket"


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize(
    ("gather", "nbytes"),
    [
        (lambda part: kernels.gather_rows(np.zeros((9, 3)), np.arange(5), part=part), 120),
        (lambda part: kernels.gather_rows(np.zeros((9, 3))[:, ::2], np.arange(5), part=part), 80),  # by NumPy
        (
            lambda part: kernels.gather_windows(
                np.zeros(9, np.uint16), np.arange(5), np.zeros((5, 4), np.int64), part=part
            ),
            40,  # as they are stored
        ),
    ],
    ids=["rows", "parts of rows", "windows"],
)
def test_gathered_rows_count_for_a_part(
    natively: bool, gather: Callable[[Part], object], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, part_of = (new_recorder, part) if natively else (Recorder, Part)
    monkeypatch.setattr(kernels, "_TIMES_PARTS", natively and kernels._TIMES_PARTS)
    read, recorder = part_of("read files"), new()
    recorder.begin()
    for _ in range(3):
        gather(read)
    with pytest.raises(IndexError):
        kernels.gather_rows(np.zeros((2, 3)), np.arange(5), part=read)
    spans = recorder.finish("fetch", None)
    assert [stop - start for name, start, stop, _ in spans if name == "read files.nbytes"] == [3 * nbytes + 120]
    assert 0 < ms(spans, "read files") <= ms(spans, "fetch")
    recorder.next_parts_ns = 1 << 62
    recorder.begin()  # most batches are not timed
    gather(read)
    assert not any(name.startswith("read") for name, *_ in recorder.finish("fetch", None))
