"""Mosaic's StreamingDataset over shards in S3, with an initially empty local folder."""

from __future__ import annotations

import json
import sys
from time import perf_counter

from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    clean_stale_shared_memory()
    start = perf_counter()
    dataset = StreamingDataset(
        remote=task["remote"], local=task["local"], shuffle=True, batch_size=task["batch"], num_canonical_nodes=1
    )
    loader = DataLoader(dataset, task["batch"], num_workers=task["workers"], collate_fn=list)
    count = sum(len(batch) for batch in loader)
    assert count == task["samples"], f"{count} samples"
    print(json.dumps({"seconds": perf_counter() - start}))
