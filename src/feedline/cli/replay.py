"""`feedline replay`: any batch of any rank, built again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, Loader, print_json
from feedline.cli.plain import plain, plain_repr
from feedline.cli.target import as_feedline, load
from feedline.errors import ArgumentError, StateError
from feedline.loader.rebuilding import rebuild_batch
from feedline.loader.report.figures import plain_indices


class Replay(NamedTuple):
    """A batch, with the request that it was built for."""

    request: Any
    batch: Any
    ranks: tuple[int, int]

    def summary(self) -> dict[str, Any]:
        """Place, samples, content and digest as a JSON object."""
        request = self.request
        indices = getattr(request, "indices", None)
        place = {"partition": request.partition} if indices is None else {
            "positions": [int(position) for position in request.positions],
            "indices": plain_indices(indices, len(request.positions)),
        }  # fmt: skip
        return {
            "epoch": request.epoch, "batch": request.number, "rank": self.ranks[0], "world_size": self.ranks[1],
            **place, "content": describe(self.batch), "digest": digest(self.batch),
        }  # fmt: skip


def run(
    target: str, step: int, *, epoch: int = 0, ranks: tuple[int | None, int | None] = (None, None),
    state: Path | None = None, out: Path | None = None,
) -> Replay:  # fmt: skip
    """Build the batch of a step.

    Steps count from the start of `epoch`, or from the position of `state` if it is given. `ranks` is rank and world
    size; None takes the loader's own. `torch.save` writes the batch to `out`. Raises `ArgumentError` for a step or rank
    that does not exist.
    """
    if out is not None and not out.parent.is_dir():
        raise ArgumentError(f"--out: there is no folder {out.parent}; make it, or name another one")
    loader = as_feedline(load(target))
    rank = loader._fl_rank if ranks[0] is None else ranks[0]
    world_size = loader._fl_world_size if ranks[1] is None else ranks[1]
    if rank >= world_size:
        raise ArgumentError(f"rank {rank} needs more than {world_size} ranks: pass --world-size")
    saved = None if state is None else read_state(state)
    try:
        request, result = rebuild_batch(loader, step, epoch, (rank, world_size), saved)
    except IndexError as error:
        raise ArgumentError(str(error)) from error
    if out is not None:
        torch.save(result.batch, out)
    return Replay(request, result.batch, (rank, world_size))


def read_state(path: Path) -> Mapping[str, Any]:
    """A loader's state from a JSON file or a `torch.save` checkpoint.

    The state may be nested in other mappings. Raises `StateError` if there is none.
    """
    remedy = "save loader.state_dict() as JSON, or within a checkpoint"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's errors for foreign files have no other base in common
            text = str(error).partition("\n")[0]
            raise StateError(
                f"{path} is neither JSON nor a checkpoint without code ({type(error).__name__}: {text}): {remedy}"
            ) from error
    found = _find_state(saved)
    if found is None:
        raise StateError(f"{path} holds no state of a feedline loader: {remedy}")
    return found


def _find_state(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    if "feedline" in value and "fingerprint" in value:
        return value
    return next((found for each in value.values() if (found := _find_state(each)) is not None), None)


def describe(batch: Any) -> Any:
    """Shapes, dtypes and types of a batch, as JSON values."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return {str(key): describe(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and len(batch) <= 8:
        return [describe(value) for value in batch]
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__


def digest(batch: Any) -> str:
    """Digest of all values of a batch, equal in every process.

    `plain` states what counts of an object.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for part in _parts(plain(batch)):
        hashed.update(len(part).to_bytes(8) + part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Kinds, sizes and contents of a plain value."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        dense = value if value.layout is torch.strided else value.to_dense()
        plainly = dense.resolve_conj().resolve_neg().contiguous()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield plainly.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, dict):
        yield f"dict of {len(value)}".encode()
        for key, part in value.items():
            yield plain_repr(key).encode()
            yield from _parts(part)
    elif isinstance(value, list):
        yield f"list of {len(value)}".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield plain_repr(value).encode("utf-8", "surrogateescape")


def show(replay: Replay, console: Console) -> None:
    """Print the place and the content of the batch."""
    found = replay.summary()
    place = f"batch {found['batch']} of epoch {found['epoch']}, rank {found['rank']} of {found['world_size']}"
    console.print(place, style="bold", markup=False)
    for name in ("partition", "positions", "indices", "content", "digest"):
        if name in found:
            console.print(f"{name}: {found[name]}", markup=False, soft_wrap=True)


def command(
    target: Loader,
    step: Annotated[int, typer.Option(min=0, help="Batches of the rank before it, in the epoch or since --state.")],
    rank: Annotated[int | None, typer.Option(min=0, help="Default: that of the loader.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks. Default: that of the loader.")] = None,
    epoch: Annotated[int, typer.Option(min=0, help="The epoch, without --state.")] = 0,
    state: Annotated[Path | None, typer.Option(help="Count from this state: JSON, or a checkpoint with one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the batch into this file, by torch.save.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build any batch of any rank again.

    With a seed, it is the batch of the run, random values included.

    The script of the loader is executed without its `if __name__ == "__main__"` block.
    """
    found = run(target, step, epoch=epoch, ranks=(rank, world_size), state=state, out=out)
    if as_json:
        print_json(found.summary())
    else:
        show(found, Console(highlight=False))
