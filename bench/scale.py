"""A job of 256 ranks over 50,000 shards (50 TB), schedule only: planning, memory, bytes per node, elasticity."""

from __future__ import annotations

import tracemalloc
from time import perf_counter, process_time

import numpy as np

from feedline.samplers import ShardShuffled
from harness import Contest

SHARDS, SAMPLES, NBYTES = 50_000, 20_000, 1_000_000_000


WORLD, NODES, BATCH, WINDOW = 256, 32, 32, 8


STEPS = 200


def sampler(partitions: int) -> ShardShuffled:
    """The order of the job, with this number of partitions."""
    return ShardShuffled([SAMPLES] * SHARDS, 0, WINDOW, partitions=partitions, global_batch_size=WORLD * BATCH)


def plan(order: ShardShuffled, rank: int, first: int) -> set[int]:
    """Plan `STEPS` steps of a rank; returns the shards that it opens in them."""
    opened = set[int]()
    for step in range(first, first + STEPS):
        start = (step * WORLD + rank) * BATCH
        opened |= set((order.take(0, start, start + BATCH) // SAMPLES).tolist())
    return opened


def step_ms(order: ShardShuffled) -> float:
    """CPU time to plan a step of a rank, in ms."""
    began = process_time()
    plan(order, 7, 100)
    return (process_time() - began) / STEPS * 1e3


def publish(name: str, unit: str, figures: dict[str, float]) -> None:
    """Publish figures that are not times; the first is the baseline."""
    contest = Contest(name, unit=unit, baseline=next(iter(figures)))
    for label, figure in figures.items():
        contest.measure(label, lambda figure=figure: figure)
    contest.run(rounds=1, warm_up=0).publish()


def main() -> None:
    contest = Contest("planning a step of 256 ranks over 50,000 shards", unit="ms", baseline="one partition")
    single, several = sampler(1), sampler(4 * WORLD)
    for name, order in (("one partition", single), ("four partitions per rank", several)):
        contest.measure(name, lambda order=order: step_ms(order))
    contest.run().publish()

    tracemalloc.start()
    order = sampler(4 * WORLD)
    opened = plan(order, 7, 0)
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    publish("memory of the order of 256 ranks over 50,000 shards", "MiB", {"limit": 200.0, "peak": peak_mib})
    print(f"shards open in {STEPS} steps of rank 7: {len(opened)} (one partition: {len(plan(single, 7, 0))})")

    shares = [len(order.shards_of(node, NODES)) * NBYTES / 1e12 for node in range(NODES)]
    publish(
        "bytes of a node, 32 nodes, 50 TB", "TB",
        {"its share": SHARDS * NBYTES / 1e12 / NODES, "the node that reads most": max(shares)},
    )  # fmt: skip
    for name, each in (("one partition", single), ("four partitions per rank", order)):
        print(f"pairs of a rank's batch from one shard, {name}: {each.mixing(BATCH).same_shard_pairs:.3f}")

    # The stream is the same for any other world size: a rank of 192 plans its rows from the same positions.
    cut = 1000 * WORLD * BATCH
    began = perf_counter()
    resumed = np.concatenate([sampler(4 * WORLD).take(0, cut + rank * 43, cut + (rank + 1) * 43) for rank in range(3)])
    whole = order.take(0, cut, cut + len(resumed))
    print(f"resumed by 192 ranks: {'the same stream' if (resumed == whole).all() else 'ANOTHER STREAM'}, "
          f"{(perf_counter() - began) / 3 * 1e3:.1f} ms to a rank's first indices")  # fmt: skip


if __name__ == "__main__":
    main()
