"""WebDataset over tars at URLs, each through a pipe from curl, as in its documentation."""

from __future__ import annotations

import json
import sys
from time import perf_counter

import webdataset as wds
from torch.utils.data import DataLoader

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    urls = [f"pipe:curl -s -f -L '{url}'" for url in task["urls"]]
    start = perf_counter()
    dataset = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(1000).to_tuple("bin", "cls")
    count = sum(
        len(batch) for batch in DataLoader(dataset, task["batch"], num_workers=task["workers"], collate_fn=list)
    )
    assert count == task["samples"], f"{count} samples"
    print(json.dumps({"seconds": perf_counter() - start}))
