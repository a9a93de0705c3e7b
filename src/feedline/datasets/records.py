"""`RecordDataset`: the base of a format of records.

A format defines how to find the records of a file (an `IndexRecipe`), and how to divide a record into fields. The base
class does the rest: paths and patterns, object stores and their cache, index files, concurrent reads, prefetch,
decoding, transforms, whole batches of images, pickling, threads, and addresses in error messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.tensors import normalize_index
from feedline.datasets.base import Field, FieldRecords, Record, RecordFiles, ShardedFields
from feedline.datasets.decoding import DAMAGE, Decode, Decoder, decoder_of, split_transform, undecodable_error
from feedline.datasets.indexes import IndexRecipe
from feedline.datasets.paths import Paths, find
from feedline.errors import SampleError
from feedline.stores import Cache


class RecordDataset(RecordFiles, ShardedFields):
    """Records of files as dicts of decoded fields.

    A subclass defines `fields`. `columns` are the fields of a record, and how each is decoded: "bytes", "text" (UTF-8),
    "npy" (a tensor), "image" (RGB) or a function of the value that `fields` returns. `transform` is a function of the
    sample, or a dict of functions by field. An image with a transform of feedline is decoded into the batch by one
    native call.

    `recipe` finds the records. Their positions are kept in an index: next to a file, or in `index_dir`, or, for
    objects, in the user's cache folder. `paths` is a path, an address, a pattern or a list of these; a folder stands
    for its files that match the pattern `inside`. Objects are kept in the folder `cache` if one is given; `options` are
    passed to `open_store`.

    Subclasses are sent to worker processes: the functions in `columns`, and the `span` of the recipe, must be functions
    of a module.
    """

    def __init__(
        self,
        paths: Paths,
        recipe: IndexRecipe,
        columns: Mapping[str, Decode],
        *,
        inside: str = "*",
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        by_field, whole = split_transform(transform, columns)
        self._by_field = {name: decoder_of(decode, by_field.get(name)) for name, decode in columns.items()}
        super().__init__(find(paths, inside, cache=cache, options=options), recipe, index_dir)
        FieldRecords.__init__(self, whole)

    def fields(self, record: Record) -> Mapping[str, Any]:
        """The encoded value of each of the columns.

        `record.data` is a read-only view of the bytes that the recipe's `span` selects. `record.shard` and `record.row`
        are the numbers of the file and of the record there. Views into the data need no copy. A SampleError is raised
        unchanged; any other error about the data becomes a SampleError that names the record.
        """
        raise NotImplementedError

    def address(self, index: int) -> tuple[str, str]:
        """The file of sample `index`, and its position there: `"record 7"`."""
        shard, row = self._at(normalize_index(index, len(self), type(self).__name__))
        return self.paths[shard], f"record {row}"

    def _decoders(self) -> Collection[Decoder]:
        return self._by_field.values()

    def _fields_in(self, record: Record) -> Mapping[str, Field]:
        describe = partial(self._describe, record.shard, record.row)
        try:
            encoded = self.fields(record)
            return {name: Field(decoder, encoded[name], describe) for name, decoder in self._by_field.items()}
        except SampleError:
            raise
        except DAMAGE as error:
            raise undecodable_error(f"{describe()} cannot be read", error, "copy the file again") from error

    def _describe(self, shard: int, row: int) -> str:
        return f"record {row} of {self.paths[shard]}"
