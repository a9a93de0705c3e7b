"""Formats by the first bytes of files, for errors about other formats."""

from __future__ import annotations

from typing import NamedTuple

from feedline.errors import SampleError
from feedline.stores.files import File

BEGIN_NBYTES = 512
"""Bytes at the start of a file that are compared: the header of a tar."""


class Signature(NamedTuple):
    """First bytes of a format, its name in messages, and a remedy."""

    magic: bytes
    what: str
    remedy: str
    may_be_text: bool = False
    """True if plain text may begin like this."""
    dataset: str = ""
    """The dataset that reads this format, if there is one."""
    at: int = 0
    """Byte at which `magic` begins."""
    also: bytes = b""
    """Bytes that must also be in the beginning of the file."""

    def fits(self, begin: bytes) -> bool:
        """True for a file that begins with these bytes."""
        return begin.startswith(self.magic, self.at) and self.also in begin


_SAVE = "save its sheets as Parquet, such as with pandas.read_excel(...).to_parquet(...)"


_FEATHER = "rewrite it with pyarrow.feather: write_feather(read_table(path), path)"


_PAGE = "check the address that it was downloaded from"


_RESAVE = "load it with {}, and save its arrays as .npy files or its tables as Parquet"


_ARRAY_RECORD = "give the loader array_record's ArrayRecordDataSource(paths), or write the records as TFRecord"


_UNPACK = "unpack the archive, or pack its files as a tar"


SIGNATURES = (
    Signature(b"PAR1", "a Parquet file", "read it with Parquet", dataset="Parquet"),
    Signature(b"ARROW1", "an Arrow file", "read it with Arrow", dataset="Arrow"),
    Signature(b"FEA1", "a file of Feather version 1", _FEATHER, True),
    Signature(b"ORC", "an ORC file", "read it with ORC", True, dataset="ORC"),
    Signature(b"Obj\x01", "an Avro file", "read it with Avro", dataset="Avro"),
    Signature(b"\x89HDF\r\n\x1a\n", "an HDF5 file", "read it with HDF5", dataset="HDF5"),
    Signature(b"CDF", "a NetCDF file of version 3", "convert it: nccopy -k nc4 OLD NEW", True),
    Signature(b"\x93NUMPY", "an array of NumPy", "read it with ArrayFile", dataset="ArrayFile"),
    Signature(b"SQLite format 3\0", "a database of SQLite", "read it with SQLManifest", dataset="SQLManifest"),
    Signature(b"DUCK", "a database of DuckDB", "write the tables as Parquet: COPY ... TO 'x.parquet'", at=8),
    Signature(b"VTXF", "a Vortex file", "write it as Parquet", True),
    Signature(b"\x83\xafp\xd1\r\x88J?", "an ArrayRecord or another Riegeli file", _ARRAY_RECORD),
    Signature(b"MATLAB 5.0 MAT-file", "a MATLAB file older than version 7.3", _RESAVE.format("scipy.io.loadmat"), True),
    Signature(b'\0\0\0{"', "a safetensors file", _RESAVE.format("safetensors"), at=5),
    Signature(b"\x9e\xa8b2frame", "a Blosc2 array", _RESAVE.format("blosc2.open")),
    Signature(b"PK\x03\x04", "a file of torch.save", _RESAVE.format("torch.load"), also=b"/data.pkl"),
    *(Signature(bytes([0x80, version]), "a pickle", _RESAVE.format("pickle.load")) for version in range(2, 6)),
    Signature(b"PK\x03\x04", "an Excel workbook or another zip archive", f"{_SAVE}, or unpack the archive"),
    Signature(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel workbook", _SAVE),
    Signature(b"\x1f\x8b", "compressed by gzip", "decompress it"),
    Signature(b"BZh", "compressed by bzip2", "decompress it"),
    Signature(b"\xfd7zXZ\0", "compressed by xz", "decompress it"),
    Signature(b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it"),
    Signature(b"]\0\0\x80\0", "compressed by lzma", "decompress it, or compress it by xz"),  # with default options
    Signature(b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    Signature(b"\x02\x21\x4c\x18", "compressed by lz4", "decompress it"),  # lz4 -l
    Signature(b"\xff\x06\0\0sNaPpY", "compressed by snappy", "decompress it"),
    Signature(b"\x1f\x9d", "compressed by compress", "decompress it"),
    Signature(b"LZIP", "compressed by lzip", "decompress it", True),
    Signature(b"7z\xbc\xaf\x27\x1c", "an archive of 7-Zip", _UNPACK),
    Signature(b"Rar!\x1a\x07", "an archive of RAR", _UNPACK),
    Signature(b"0707", "an archive of cpio", _UNPACK, True),
    Signature(b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself with: git lfs pull", True),
    Signature(b"<!DOCTYPE html", "a web page", _PAGE, True),
    Signature(b"<!doctype html", "a web page", _PAGE, True),
    Signature(b"<html", "a web page", _PAGE, True),
    Signature(b"<?xml", "an XML document, such as the answer of a store to a failed request", _PAGE, True),
    Signature(b"ustar", "a tar", "read it with TarShards", True, dataset="TarShards", at=257),
)


_LANCE = "write it as Parquet: pyarrow.parquet.write_table(lance.dataset(...).to_table(), ...)"


_ENDINGS = {".lance": Signature(b"", "a data file of a Lance table", _LANCE)}
"""Formats whose files begin with their data."""


FOLDERS = {
    "_versions": f"a table of Lance; {_LANCE}",
    "__schema": "an array of TileDB; save its arrays as .npy files or in a Zarr store",
    "version_control_info.json": "a dataset of Deep Lake; write its samples in a format that feedline reads",
    "zarr.json": "a Zarr store; read it with Zarr",
    ".zgroup": "a Zarr store; read it with Zarr",
    ".zarray": "a Zarr store; read it with Zarr",
    "data.mdb": "an LMDB environment; read it with LMDB",
}
"""Kind of a folder and the remedy, by a name in it."""


_TEXT = Signature(b"", "text", "read it with CSV, JSONL or Lines", True)


_CONTROL = frozenset(range(32)) - set(b"\t\n\r\f")


_FEWEST_NBYTES, _MOST_NBYTES = 8, 128
"""Numbers of bytes that show text. Fewer may be the truncated magic of any format."""


def recognize(begin: bytes, name: str = "") -> Signature | None:
    """Format by the first bytes or the name; None if unknown."""
    begin = begin[:BEGIN_NBYTES]
    for ending, signature in _ENDINGS.items():
        if name.endswith(ending):
            return signature
    for signature in SIGNATURES:
        if signature.fits(begin):
            return signature
    begin = begin[:_MOST_NBYTES]
    is_text = len(begin) >= _FEWEST_NBYTES and begin.isascii() and not _CONTROL.intersection(begin)
    return _TEXT if is_text else None


def begin_of(file: File) -> bytes:
    """The first bytes of a file."""
    return bytes(file.read([(0, min(file.nbytes, BEGIN_NBYTES))])[0]) if file.nbytes else b""


def check_format(name: str, form: str, begin: bytes) -> None:
    """Raise SampleError for a file with the beginning of another format.

    `form` is the name of the dataset that should read it.
    """
    found = recognize(begin, name)
    if found is not None and found.dataset != form:
        raise SampleError(f"{name} is {found.what}, not {form}; {found.remedy}")


def damage_error(what: str, form: str, problem: object) -> SampleError:
    """The error for data that a library cannot read."""
    if isinstance(problem, NotImplementedError):  # of pyarrow: the file may be intact
        return SampleError(
            f"{what} cannot be read: it has a type or an encoding that the installed library does not know"
            f" ({problem}); write it with another one, or update the library"
        )
    return SampleError(
        f"{what} cannot be read: it is damaged, truncated, or not {form} ({problem}); re-create it or leave it out"
    )
