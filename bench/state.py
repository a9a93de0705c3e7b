"""The time to take a state, its size, and the time to resume in the middle of 10^12 samples."""

from __future__ import annotations

import json
from time import perf_counter

import feedline as fl
from harness import Contest

LENGTH = 10**12


class Huge:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def resume_s() -> float:
    """Seconds from a new loader to the batch after position 10^11."""
    state = json.loads(json.dumps(fl.DataLoader(Huge(), 256, shuffle=True, seed=0).state_dict()))
    state["position"] = 10**11 // 256 * 256
    start = perf_counter()
    loader = fl.DataLoader(Huge(), 256, shuffle=True, seed=0)
    loader.load_state_dict(state)
    next(iter(loader))
    return perf_counter() - start


def main() -> None:
    loader = fl.DataLoader(Huge(), 256, shuffle=True, seed=0)
    batches = iter(loader)
    next(batches)
    race = Contest("state", unit="s", baseline="the limit of 20 µs")
    race.measure("the limit of 20 µs", lambda: 20e-6)
    race.add("state_dict", lambda: [loader.state_dict() for _ in range(1000)], work=1000)
    race.measure("the limit of 50 ms", lambda: 50e-3)
    race.measure("resume at 10^11 of 10^12", resume_s)
    race.run().publish()
    print(f"the state has {len(json.dumps(loader.state_dict()))} bytes")


if __name__ == "__main__":
    main()
