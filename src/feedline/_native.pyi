from collections.abc import Sequence

from numpy import float32, generic, int32, int64, uint8, uint16, uint64
from numpy.typing import NDArray

def permuted(key: int, length: int, start: int, out: NDArray[int64]) -> None: ...
def permuted_at(key: int, length: int, places: NDArray[int64], out: NDArray[int64]) -> None: ...
def gather_rows(
    array: NDArray[generic], indices: NDArray[int64], out: NDArray[generic], threads: int, part: object
) -> bool: ...
def gather_windows(
    items: NDArray[generic], offsets: NDArray[int64], out: NDArray[generic], widen: int, threads: int, part: object
) -> bool: ...
def take_planes(
    images: NDArray[generic],
    lines: NDArray[int64],
    columns: NDArray[int64],
    fill: NDArray[generic],
    out: NDArray[generic],
    threads: int,
) -> bool: ...
def mixture_blocks(
    counts: NDArray[int64],
    datasets: int,
    first: int,
    jitter_key: int,
    begin_key: int,
    owners: NDArray[int32],
) -> None: ...
def interleave(
    owners: NDArray[int32],
    parts: NDArray[int64],
    starts: NDArray[int64],
    shifts: NDArray[int64],
    out: NDArray[int64],
) -> None: ...
def crc32(data: object) -> int: ...
def run_length_sums(data: bytes, version: int, is_signed: bool) -> tuple[int, int, int, int] | None: ...
def sum_spans(
    batches: list[Sequence[tuple[str, int, int, int]]], bounds: NDArray[int64]
) -> dict[tuple[str, int], tuple[int, int, int, list[tuple[int, int]]]]: ...
def adjust_colors(image: NDArray[uint8], adjustments: list[tuple[int, float]]) -> None: ...
def blur_image(bordered: NDArray[uint8], across: list[float], down: list[float], out: NDArray[uint8]) -> None: ...

class ImagePlan:
    def __init__(
        self,
        size: tuple[int, int],
        law: int,
        bounds: tuple[float, float, float, float],
        *,
        flip: float,
        bicubic: bool,
        planar: bool,
        number: int,
        values: NDArray[float32],
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        oriented: bool,
        scaled: bool,
        torchs: bool = False,
        sets: int = ...,
        quick: bool = True,
    ) -> None: ...
    def read(
        self,
        sources: Sequence[object],
        out: NDArray[generic],
        keys: NDArray[uint64] | None,
        grids: Sequence[NDArray[uint16] | None] | None,
        limit: int,
        threads: int,
    ) -> list[tuple[int, int, int, str]] | None: ...
    def geometry(
        self, key: int, width: int, height: int
    ) -> tuple[tuple[int, int, int, int], bool, tuple[int, int], tuple[int, int, int, int]]: ...

def image_header(
    source: object, limit: int
) -> tuple[tuple[int, int, str, int, bool, int] | None, tuple[int, int, int, str] | None]: ...
def grid_rewrite(jpeg: object) -> tuple[bytes, bytes] | str: ...
def grid_measure(jpeg: object) -> bytes | None: ...
def grid_assemble(
    jpeg: object, lengths: NDArray[uint16], wanted: tuple[int, int, int, int], denominator: int = 1
) -> tuple[bytes, tuple[int, int, int, int]] | None: ...
def image_decode(jpeg: object, out: NDArray[uint8], quick: bool = True) -> tuple[int, int, int, str] | None: ...
def image_intact(jpeg: object) -> tuple[int, int, int, int] | None: ...
def image_part(
    source: object,
    size: tuple[int, int],
    scale: int,
    part: tuple[int, int, int, int],
    resize: tuple[int, tuple[float, float, float, float], tuple[int, int], tuple[int, int], bool, bool] | None,
    rows: tuple[int, int],
) -> bytes | None: ...
def image_quick() -> bool: ...
