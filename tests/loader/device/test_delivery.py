"""The last steps of batches on their device: transform, conversion, static buffers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from held_items import HeldItems
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

import feedline as fl
from feedline import transforms
from feedline.errors import ArgumentError
from feedline.loader.ranks.agreement import Agreement
from feedline.loader.rebuilding import batches_from
from feedline.testing.difference import check_same

LENGTH = 22
IMAGES = torch.randint(0, 256, (LENGTH, 3, 12, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(IMAGES, torch.arange(LENGTH) % 4)
AUGMENT = transforms.OnBatch(
    [
        transforms.RandomResizedCrop(8),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize([0.5], [0.2]),
        transforms.MixUp(4),
    ]
)


def loader(data: Any = DATA, **arguments: Any) -> fl.DataLoader[Any]:
    steps = {name: arguments.pop(name) for name in list(arguments) if name in fl.Delivery.__dataclass_fields__}
    return fl.DataLoader(data, 5, seed=2, shuffle=True, device=fl.Delivery(**{"device": "cpu", **steps}), **arguments)


def test_augmentation_on_the_device_is_the_same_for_all_workers_and_after_a_resume() -> None:
    with loader(transform=AUGMENT) as plain:
        expected = list(plain)
    assert expected[0][0].shape == (5, 3, 8, 8)
    for arguments in ({"num_workers": 2, "worker_method": "thread"}, {"num_workers": 1, "worker_method": "process"}):
        with loader(transform=AUGMENT, prefetch=3, **arguments) as worked:
            check_same(expected, list(worked), "batches must not depend on the workers")
    with loader(transform=AUGMENT) as cut, loader(transform=AUGMENT) as resumed:
        begun = list(islice(cut, 2))
        resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
        check_same(expected, begun + list(resumed), "a resumed loader must go on with the same numbers")


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_augmentation_in_place_leaves_the_data_alone(kind: str) -> None:
    flips = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()])
    workers: dict[str, Any] = {} if kind == "inline" else {"num_workers": 1, "worker_method": kind}
    before = IMAGES.clone()
    with (
        loader(transform=transforms.OnBatch(flips)) as copying,
        loader(transform=transforms.OnBatch(flips, inplace=True), **workers) as writing,
    ):
        for _ in range(2):
            check_same(list(copying), list(writing), "batches must be the same in place")
    assert torch.equal(IMAGES, before)


@dataclass
class Levels:
    """A batch whose constructor scales it."""

    x: torch.Tensor
    mask: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.x = self.x / 255


def as_levels(samples: list[Any]) -> Levels:
    levels = Levels(torch.stack([image for image, _ in samples]))
    levels.mask = levels.x > 0.5
    return levels


@pytest.mark.parametrize("device", ["cpu", fl.Delivery("cpu", static=True)], ids=["plain", "static"])
def test_a_dataclass_arrives_as_it_was_collated(device: Any) -> None:
    plain = fl.DataLoader(DATA, 11, collate_fn=as_levels)
    delivered = fl.DataLoader(DATA, 11, collate_fn=as_levels, device=device)
    for expected, batch in zip(plain, delivered, strict=True):
        assert type(batch) is Levels
        assert torch.equal(batch.x, expected.x)
        assert expected.mask is not None
        assert batch.mask is not None
        assert torch.equal(batch.mask, expected.mask)


def test_a_conversion_leaves_cached_samples_alone() -> None:
    cached = [HeldItems({"x": torch.ones(2)})]
    loader = fl.DataLoader(
        cached, batch_size=None, collate_fn=lambda sample: sample, device=fl.Delivery("cpu", dtype=torch.float64)
    )
    (delivered,) = loader
    assert type(delivered) is HeldItems
    assert delivered["x"].dtype == torch.float64
    assert cached[0]["x"].dtype == torch.float32


def test_the_numbers_of_a_row_are_its_own_for_every_batch_size() -> None:
    flip = transforms.OnBatch(transforms.RandomErasing(1.0))
    delivery = fl.Delivery("cpu", transform=flip)
    large, small = (
        torch.cat([images for images, _ in fl.DataLoader(DATA, size, seed=2, shuffle=True, device=delivery)])
        for size in (11, 3)
    )
    assert torch.equal(large, small)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(image, label) for image, label in zip(IMAGES, DATA.tensors[1], strict=True)])


def test_streams_draw_by_the_place_in_their_partition() -> None:
    def streaming() -> fl.DataLoader[Any]:
        return fl.DataLoader(Stream(), 5, seed=3, device=fl.Delivery("cpu", transform=AUGMENT))

    expected = list(streaming())
    assert not torch.equal(expected[0][0], expected[1][0])
    cut, resumed = streaming(), streaming()
    begun = list(islice(cut, 2))
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    check_same(expected, begun + list(resumed), "a resumed stream must go on with the same numbers")


class Breaking(torch.utils.data.IterableDataset[int]):
    """Numbers from an iterator that raises at 3 and goes on."""

    def __iter__(self) -> Any:
        return map(self.check, range(12))

    def check(self, number: int) -> int:
        if number == 3:
            raise ValueError(number)
        return number


class Repeating(Agreement):
    """A rank that repeats batches until others have ended."""

    def __init__(self, loader: Any, steps: int) -> None:
        self._again = lambda: batches_from(loader, loader._fl_plan, loader._fl_plan.start_of(0))
        self._repeated, self._left = None, steps

    def agree_on_step(self, *, has_batch: bool) -> bool:
        self._left -= 1
        return self._left >= 0


def keys_of_rows(loader: fl.DataLoader[Any], repeats_to: int | None = None) -> list[tuple[int, int]]:
    """Each row with its key, from a loader whose transform gives both."""
    found: list[tuple[int, int]] = []
    iterator: Any = iter(loader)
    if repeats_to is not None:
        iterator.agreement = Repeating(loader, repeats_to)
    while True:
        try:
            numbers, keys = next(iterator)
        except StopIteration:
            return found
        except ValueError:
            continue
        found += zip(numbers.tolist(), keys, strict=True)


def with_their_keys(numbers: Any, keys: Any) -> Any:
    return numbers, keys.tolist()


@pytest.mark.filterwarnings("ignore:.*has no partitions. each of")
def test_each_row_of_a_stream_has_its_own_key() -> None:
    delivery = fl.Delivery("cpu", transform=with_their_keys)
    alone = keys_of_rows(fl.DataLoader(Breaking(), 2, seed=3, device=delivery))
    assert [number for number, _ in alone] == [0, 1, *range(4, 12)]
    ranks = [
        keys_of_rows(fl.DataLoader(Breaking(), 2, seed=3, device=delivery, distributed=(rank, 2))) for rank in range(2)
    ]
    assert ranks == [[(number, key) for number, key in alone[2:] if number % 2 == rank] for rank in range(2)]
    assert len({key for _, key in alone}) == len(alone)
    twice = keys_of_rows(fl.DataLoader(range_stream(6), 2, seed=3, device=delivery), repeats_to=5)
    assert twice[6:] == twice[:4]


def range_stream(length: int) -> Any:
    return fl.streams.from_items([length], range)


class Gaps(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise ValueError(index)
        return super().__getitem__(index)


def test_samples_that_are_left_out_have_no_keys() -> None:
    erase = transforms.OnBatch(transforms.RandomErasing(1.0))
    with loader(transform=erase) as whole, loader(Gaps(*DATA.tensors), transform=erase, on_error="skip") as gaps:
        alone = {int(image.sum()) for images, _ in whole for image in images}
        kept = [int(image.sum()) for images, _ in gaps for image in images]
    assert len(kept) == LENGTH - 3
    assert alone.issuperset(kept)


def test_without_a_seed_torch_decides() -> None:
    def batches() -> list[Any]:
        torch.manual_seed(4)
        return list(fl.DataLoader(DATA, 5, device=fl.Delivery("cpu", transform=AUGMENT)))

    check_same(batches(), batches(), "the same random state must give the same batches")


def test_levels_cross_and_numbers_arrive() -> None:
    def scaled(batch: Any) -> Any:
        return batch[0].float().div(255), batch[1]

    with loader(device="meta", transform=scaled, drop_last=True) as levels:
        images, _ = next(iter(levels))
        assert (images.dtype, images.device.type) == (torch.float32, "meta")
        few = levels.stats().copied_nbytes
    with loader(TensorDataset(IMAGES.float(), DATA.tensors[1]), device="meta") as numbers:
        next(iter(numbers))
        many = numbers.stats().copied_nbytes
    assert (many - 40) == 4 * (few - 40)


def test_conversions_leave_labels_alone() -> None:
    data = TensorDataset(IMAGES.float(), torch.arange(LENGTH))
    with loader(data, dtype=torch.bfloat16, memory_format=torch.channels_last) as converted:
        images, labels = next(iter(converted))
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_static_batches_have_the_same_addresses_in_all_epochs() -> None:
    with (
        loader(static=True, drop_last=True, transform=AUGMENT) as static,
        loader(drop_last=True, transform=AUGMENT) as free,
    ):
        addresses = set()
        for _ in range(2):
            for batch, other in zip(static, free, strict=True):
                check_same([other], [batch], "a static batch must hold the values of its turn")
                addresses.add(tuple(tensor.data_ptr() for tensor in batch))
    assert len(addresses) == 1


@pytest.mark.parametrize("static", [False, True])
def test_a_compiled_step_is_not_compiled_again(static: bool) -> None:
    """With a backend that only traces: the machine may have no compiler."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda images, labels: (images.float().mean((1, 2, 3)) * labels).sum(), backend=backend)
    torch._dynamo.reset()
    with loader(static=static, drop_last=True, num_workers=1, worker_method="thread", transform=AUGMENT) as batches:
        sums = [[float(step(images, labels.argmax(1))) for images, labels in batches] for _ in range(2)]
        plain = [float((images.float().mean((1, 2, 3)) * labels.argmax(1)).sum()) for images, labels in batches]
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert [len(each) for each in sums] == [LENGTH // 5] * 2
    assert len(plain) == LENGTH // 5


def test_a_step_may_keep_batches_that_are_not_static() -> None:
    with loader() as kept, loader() as seen:
        held = list(kept)
        check_same(list(seen), held, "later batches must not overwrite earlier ones")


def test_static_batches_keep_the_address_of_each_key() -> None:
    def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
        numbers = torch.tensor([int(sample[1]) for sample in samples])
        batch = {"x": numbers, "y": -numbers - 1}
        return batch if numbers[0] % 2 else dict(reversed(batch.items()))

    addresses = set()
    with loader(static=True, drop_last=True, collate_fn=collated) as batches:
        orders = set()
        for batch in batches:
            orders.add(tuple(batch))
            addresses.add((batch["x"].data_ptr(), batch["y"].data_ptr()))
            assert torch.equal(batch["y"], -batch["x"] - 1)
            assert batch["x"].min() >= 0
    assert (len(orders), len(addresses)) == (2, 1)


def test_tensors_that_cannot_be_static_are_named() -> None:
    message = "cannot keep the addresses of tensors in a Graph: return a dict"
    with (
        loader(static=True, collate_fn=lambda samples: Graph(samples[0][0])) as batches,
        pytest.raises(ArgumentError, match=message),
    ):
        next(iter(batches))


def test_packed_sequences_are_converted() -> None:
    def collated(samples: list[Any]) -> Any:
        return pack_sequence([sample[0][0].float() for sample in samples])

    with loader(dtype=torch.bfloat16, collate_fn=collated) as batches:
        batch = next(iter(batches))
    assert (batch.data.dtype, batch.batch_sizes.dtype) == (torch.bfloat16, torch.int64)


def test_a_shorter_static_batch_is_named() -> None:
    with loader(static=True) as static, pytest.raises(ArgumentError, match=r"equal shapes.*drop_last=True") as caught:
        list(static)
    assert any("after the copy of" in note for note in caught.value.__notes__)


class Graph:
    """A user's batch type, with `to`."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: Any) -> Graph:
        return Graph(self.nodes.to(device))


def test_any_batch_arrives() -> None:
    def collated(samples: list[Any]) -> Any:
        images = [image for image, _ in samples]
        return {
            "ragged": images,
            "nested": torch.nested.nested_tensor([image.float() for image in images], layout=torch.jagged),
            "graph": Graph(torch.stack(images)),
            "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
            "names": ("a", None),
            "array": np.zeros(2),
        }

    with loader(collate_fn=collated, device="meta", dtype=torch.float16) as mixed:
        batch = next(iter(mixed))
    assert batch["ragged"][0].device.type == batch["graph"].nodes.device.type == "meta"
    assert batch["nested"].is_nested
    assert batch["packed"].data.device.type == "meta"
    assert (batch["names"], type(batch["array"])) == (("a", None), np.ndarray)


def test_ranges_show_in_profiles() -> None:
    flip = transforms.OnBatch(transforms.RandomHorizontalFlip())
    with loader(device="meta", transform=flip) as profiled, torch.profiler.profile() as profile:
        next(iter(profiled))
    counts = {event.key: event.count for event in profile.key_averages()}
    names = ("feedline.copy", "feedline.deliver", "feedline.transform")
    assert [counts.get(name) for name in names] == [1, 1, 1], counts


def test_an_error_of_the_transform_names_the_batch_and_the_next_one_comes() -> None:
    calls: list[Any] = []

    def fragile(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("bad batch")
        return batch

    with loader(transform=fragile) as failing:
        batches = iter(failing)
        next(batches)
        with pytest.raises(ValueError, match="bad batch") as caught:
            next(batches)
        assert any("on cpu, after the copy of" in note for note in caught.value.__notes__)
        assert len(list(batches)) == 3


class TooLarge:
    """A batch that does not fit on its device."""

    nbytes = host_nbytes = 5 << 30

    def to(self, device: Any) -> Any:
        raise torch.OutOfMemoryError(f"{device} out of memory")


def full(batch: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        ({"collate_fn": lambda _: TooLarge()}, (r"batch of 5368709120 bytes was copied to cpu", r"batch 0 of epoch 0")),
        ({"transform": full, "prefetch": 3}, (r"batch 0 of epoch 0", r"has 2920 bytes there.*prefetch=2\)")),
        ({"transform": full, "device": "meta"}, (r"batch 0 of epoch 0", r"has 2920 bytes there")),
        ({"transform": full, "prefetch": 1}, (r"batch 0 of epoch 0", r"prefetch=1: make it smaller")),
        ({"transform": full, "prefetch": "1 GiB"}, (r"batch 0 of epoch 0", r"a smaller Delivery\(..., prefetch=\)")),
    ],
    ids=["copy", "transform", "on its device", "one", "amount"],
)
def test_a_batch_without_memory_for_it_is_named(arguments: dict[str, Any], notes: tuple[str, ...]) -> None:
    with loader(**arguments) as failing, pytest.raises(torch.OutOfMemoryError) as caught:
        next(iter(failing))
    text = "\n".join(caught.value.__notes__)
    assert all(re.search(note, text) for note in notes), text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "gpu"}, "is not a device that torch knows"),
        ({"prefetch": 0}, "give at least 1 batch"),
        ({"prefetch": "many"}, "give at least 1 batch"),
        ({"transform": 3}, "give a callable"),
        ({"dtype": torch.int8}, "give a floating-point dtype"),
        ({"prefetch": 1.5}, "give at least 1 batch"),
        ({"prefetch": True}, "give at least 1 batch"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16'\): give a floating-point dtype"),
        ({"memory_format": "channels_last"}, "give torch.channels_last or torch.channels_last_3d"),
        ({"memory_format": torch.contiguous_format}, "give torch.channels_last or"),
        ({"static": "no"}, "give True or False"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fl.Delivery(**{"device": "cpu", **arguments})
