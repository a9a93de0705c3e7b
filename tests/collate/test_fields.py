"""pad, ragged, detection and token_budget."""

from __future__ import annotations

import math
import pickle
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from recorder import Recorder

from feedline import collate
from feedline.collate import Padded
from feedline.errors import ArgumentError, CollateError


class Sample(NamedTuple):
    tokens: torch.Tensor
    label: int


@dataclass
class Part:
    values: torch.Tensor


def ranges(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(1, length + 1) for length in lengths]


class TestPad:
    def test_values_lengths_and_mask(self) -> None:
        padded = collate.pad()(ranges(2, 3))
        assert padded.values.tolist() == [[1, 2, 0], [1, 2, 3]]
        assert padded.lengths.tolist() == [2, 3]
        assert padded.lengths.dtype == torch.int64
        assert padded.mask.tolist() == [[True, True, False], [True] * 3]

    def test_left(self) -> None:
        padded = collate.pad(9, side="left", multiple_of=4)(ranges(2, 3))
        assert padded.values.tolist() == [[9, 9, 1, 2], [9, 1, 2, 3]]
        assert padded.mask.tolist() == [[False, False, True, True], [False, True, True, True]]

    def test_max_length_cuts_the_end(self) -> None:
        padded = collate.pad(max_length=2)(ranges(1, 5))
        assert padded.values.tolist() == [[1, 0], [1, 2]]
        assert padded.lengths.tolist() == [1, 2]

    def test_without_mask(self) -> None:
        assert collate.pad(mask=False)(ranges(1, 2)).mask is None

    @pytest.mark.parametrize("kind", [torch.as_tensor, np.array, list])
    def test_tensors_arrays_and_lists_of_numbers(self, kind: Any) -> None:
        padded = collate.pad()([{"ids": kind([5, 6])}, {"ids": kind([7])}])["ids"]
        assert padded.values.tolist() == [[5, 6], [7, 0]]
        assert padded.values.dtype == torch.int64

    def test_an_empty_list_takes_the_dtype_of_the_others(self) -> None:
        padded = collate.pad()([[], [1, 2], []])
        assert padded.values.tolist() == [[0, 0], [1, 2], [0, 0]]
        assert padded.values.dtype == torch.int64

    @pytest.mark.filterwarnings("error")
    def test_read_only_arrays_warn_of_nothing(self) -> None:
        array = np.arange(3)
        array.flags.writeable = False
        assert collate.pad()([array]).values.tolist() == [[0, 1, 2]]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.bool, torch.float8_e4m3fn])
    def test_dtypes_that_numpy_has_or_lacks(self, dtype: torch.dtype) -> None:
        values = collate.pad()([torch.ones(1).to(dtype), torch.ones(2).to(dtype)]).values
        assert values.dtype == dtype
        assert values.float().tolist() == [[1, 0], [1, 1]]

    def test_trailing_dimensions_stay(self) -> None:
        padded = collate.pad()([torch.ones(2, 5), torch.ones(1, 5)])
        assert padded.values.shape == (2, 2, 5)
        assert padded.mask.shape == (2, 2)

    def test_trailing_dimensions_that_differ_are_named(self) -> None:
        with pytest.raises(CollateError, match=r"batch\['x'\]: only the first .* \(2, 5\) and sample 1 has \(1, 4\)"):
            collate.pad()([{"x": torch.ones(2, 5)}, {"x": torch.ones(1, 4)}])

    def test_whether_a_field_is_padded_does_not_depend_on_its_lengths(self) -> None:
        assert isinstance(collate.pad()(ranges(2, 2)), Padded)

    def test_keys_narrow_it_to_fields_by_name_or_place(self) -> None:
        samples = [{"text": (tokens, 1), "image": torch.ones(2)} for tokens in ranges(1, 2)]
        batch = collate.pad(keys=[0])(samples)
        assert isinstance(batch["text"][0], Padded)
        assert batch["text"][1].tolist() == [1, 1]
        assert batch["image"].shape == (2, 2)

    def test_named_tuples_and_other_containers_stay(self) -> None:
        batch = collate.pad(keys="tokens")([Sample(tokens, 3) for tokens in ranges(1, 2)])
        assert type(batch) is Sample
        assert isinstance(batch.tokens, Padded)
        assert type(collate.pad()([UserDict(x=1)])) is UserDict

    def test_a_key_that_no_sample_has_is_refused(self) -> None:
        with pytest.raises(CollateError, match=r"no field 'token'; they have \['tokens', 'label'\]"):
            collate.pad(keys=["token"])([{"tokens": torch.ones(2), "label": 1}])

    def test_a_key_that_holds_no_sequence_is_refused(self) -> None:
        with pytest.raises(CollateError, match=r"batch\['label'\]: sample 0 of the batch holds int"):
            collate.pad(keys=["label"])([{"label": 1}])

    def test_values_by_field(self) -> None:
        samples = [{"ids": [1], "labels": [1], "mask": [1]}, {"ids": [1, 2], "labels": [1, 2], "mask": [1, 1]}]
        batch = collate.pad({"ids": 50256, "labels": -100})(samples)
        assert [batch[key].values[0, 1].item() for key in ("ids", "labels", "mask")] == [50256, -100, 0]

    @pytest.mark.parametrize("collator", [collate.pad, lambda value: collate.token_budget(4, value=value)])
    def test_values_that_no_field_has_or_can_hold_are_refused(self, collator: Any) -> None:
        samples = [{"ids": [1], "x": torch.ones(1, dtype=torch.uint8)}, {"ids": [1, 2], "x": torch.ones(2).byte()}]
        with pytest.raises(CollateError, match=r"value= names 'idz', but .* padded are \['ids', 'x'\]: correct"):
            collator({"ids": 7, "idz": -100})(samples)
        for value in (-100, 300, 0.5, math.nan):
            with pytest.raises(CollateError, match=r"batch\['x'\]: torch.uint8 cannot hold the padding value"):
                collator({"x": value})(samples)
        assert collator({"x": 255.0, "ids": -1})(samples) is not None
        with pytest.raises(CollateError, match="sample 1 of the batch lacks the field 'ids'"):
            collate.token_budget(4)([*samples[:1], {"x": [1]}])
        with pytest.raises(CollateError, match=r"torch.bool cannot hold the padding value -1"):
            collator(-1)([torch.ones(2, dtype=torch.bool)])

    def test_a_single_place_is_a_key(self) -> None:
        batch = collate.pad(keys=0)([(torch.ones(2), torch.ones(2))])
        assert isinstance(batch[0], Padded)
        assert isinstance(batch[1], torch.Tensor)

    def test_memory_comes_from_the_allocator(self) -> None:
        empty = Recorder()
        assert empty.holds(collate.pad()([(tokens, 1, 2.0) for tokens in ranges(1, 2)], allocate=empty))

    def test_a_gradient_is_not_dropped_silently(self) -> None:
        for collator in (collate.pad(), collate.token_budget(4)):
            with pytest.raises(CollateError, match=r"batch\['x'\]: a sequence requires grad.*detach"):
                collator([{"x": torch.ones(2, requires_grad=True)}])

    def test_travels_to_workers(self) -> None:
        recipe = collate.pad({"ids": 3}, side="left", keys=["ids"])
        assert pickle.loads(pickle.dumps(recipe)) == recipe

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"side": "middle"}, "'middle'"),
            ({"multiple_of": 0}, "multiple_of"),
            ({"max_length": 0}, "max_length=0"),
            ({"max_length": 10, "multiple_of": 8}, "multiple of multiple_of=8"),
        ],
    )
    def test_arguments_are_checked(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            collate.pad(**arguments)


class TestRagged:
    def test_every_tensor_is_kept_apart(self) -> None:
        batch = collate.ragged()([{"boxes": np.ones((i, 4)), "id": i} for i in (2, 1)])
        assert [boxes.shape for boxes in batch["boxes"]] == [(2, 4), (1, 4)]
        assert all(isinstance(boxes, torch.Tensor) for boxes in batch["boxes"])
        assert batch["id"].tolist() == [2, 1]

    def test_a_named_field_is_kept_with_all_it_holds(self) -> None:
        empty = Recorder()
        samples = [(torch.ones(3, 4, 4), {"boxes": torch.ones(i, 4), "labels": torch.ones(i)}) for i in (2, 1)]
        images, targets = collate.ragged([1])(samples, allocate=empty)
        assert empty.holds([images, targets])
        assert [sorted(target) for target in targets] == [["boxes", "labels"]] * 2

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("keys", [None, ["x"]])
    @pytest.mark.parametrize("allocate", [None, Recorder()])
    def test_writing_to_a_batch_changes_no_sample(self, tmp_path: Path, keys: Any, allocate: Any) -> None:
        np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
        read_only, private = np.load(tmp_path / "x.npy", mmap_mode="r"), np.load(tmp_path / "x.npy", mmap_mode="c")
        tensor = torch.from_numpy(private.copy())
        channels_last = torch.arange(6.0, dtype=torch.float64).reshape(1, 3, 1, 2).to(memory_format=torch.channels_last)
        values = [read_only[0], private[0], private[1, ::-1], tensor[1], tensor.T, channels_last, tensor.to_sparse()]
        before = [torch.tensor(value.tolist(), dtype=torch.float64) for value in values[:-1]]
        batch = collate.ragged(keys)([{"x": value} for value in values], allocate=allocate)["x"]
        assert all(map(torch.equal, batch[:-1], before))
        assert batch[5].stride() == channels_last.stride()
        for each in batch:
            each.mul_(2)
        assert [value.tolist() for value in values[:-1]] == [was.tolist() for was in before]
        assert torch.equal(values[-1].to_dense(), tensor)

    def test_objects_are_passed_on(self) -> None:
        part = Part(torch.ones(2))
        assert collate.ragged(["part"])([{"part": part}])["part"][0] is part

    def test_strings_and_gradients_stay(self) -> None:
        weight, names = torch.ones(2, requires_grad=True), np.array(["a", "b"])
        batch = collate.ragged()([weight, weight])
        assert batch[0] is weight
        (kept,) = collate.ragged()([names])
        assert kept.tolist() == ["a", "b"]
        assert kept is not names

    def test_travels_to_workers(self) -> None:
        assert pickle.loads(pickle.dumps(collate.ragged(["boxes"]))) == collate.ragged(["boxes"])


def test_detection_gives_tuples_per_field() -> None:
    samples = [(torch.ones(3, i, i), {"boxes": torch.ones(i, 4)}) for i in (2, 1)]
    images, targets = collate.detection(samples)
    assert images == (samples[0][0], samples[1][0])
    assert targets[1] is samples[1][1]


class TestTokenBudget:
    def test_rows_positions_segments_and_bounds(self) -> None:
        packed = collate.token_budget(6, value=-1)(ranges(4, 3, 2))
        assert packed.values.tolist() == [[1, 2, 3, 4, 1, 2], [1, 2, 3, -1, -1, -1]]
        assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
        assert packed.segments.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
        assert packed.cu_seqlens.tolist() == [0, 4, 6, 9, 12]
        assert packed.cu_seqlens.dtype == torch.int32
        assert packed.order.tolist() == [0, 2, 1]

    def test_fields_of_one_length_are_packed_alike(self) -> None:
        samples = [{"ids": tokens, "labels": -tokens} for tokens in ranges(2, 2)]
        packed = collate.token_budget(5, value={"labels": -100})(samples)
        assert packed.values["ids"].tolist() == [[1, 2, 1, 2, 0]]
        assert packed.values["labels"].tolist() == [[-1, -2, -1, -2, -100]]

    @pytest.mark.parametrize(("max_tokens", "truncate"), [(5, False), (1, True)])
    def test_fields_of_different_lengths_are_refused(self, max_tokens: int, truncate: bool) -> None:
        with pytest.raises(CollateError, match=r"sample 0 .* 2 tokens in batch\['a'\], but 1 in batch\['b'\]"):
            collate.token_budget(max_tokens, truncate=truncate)([{"a": [1, 2], "b": [1]}])

    def test_a_sequence_that_no_row_holds_is_refused_or_cut(self) -> None:
        with pytest.raises(CollateError, match="sample 1 of the batch has 5 tokens, more than max_tokens=4"):
            collate.token_budget(4)(ranges(2, 5))
        assert collate.token_budget(4, truncate=True)(ranges(2, 5)).values.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]

    @pytest.mark.parametrize("samples", [[torch.ones(2, 2)], [{}], [3]])
    def test_what_is_no_sequence_is_refused(self, samples: list[Any]) -> None:
        with pytest.raises(CollateError):
            collate.token_budget(4)(samples)

    def test_memory_comes_from_the_allocator(self) -> None:
        empty = Recorder()
        packed = collate.token_budget(4)(ranges(2, 3), allocate=empty)
        assert empty.holds([packed.values, packed.positions, packed.segments])

    def test_the_budget_is_checked(self) -> None:
        with pytest.raises(ArgumentError, match="max_tokens"):
            collate.token_budget(0)


class FakeTokenizer:
    """The part of a Hugging Face tokenizer that their collators use."""

    def pad(self, features: list[dict[str, Any]], return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        longest = max(len(feature["input_ids"]) for feature in features)
        rows = [feature["input_ids"] + [0] * (longest - len(feature["input_ids"])) for feature in features]
        return {"input_ids": torch.tensor(rows)}


class DataCollatorWithPadding:
    """A collator like those of Hugging Face: an object that is called with a list of dicts."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self.tokenizer.pad(features, return_tensors="pt")


def test_a_hugging_face_collator_and_pad_agree() -> None:
    samples = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    theirs = DataCollatorWithPadding(FakeTokenizer())(samples)
    ours = collate.pad()(samples)
    assert torch.equal(theirs["input_ids"], ours["input_ids"].values)
