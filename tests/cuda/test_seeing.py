"""What reports, profilers and NVML show of a loop on a real device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import feedline as fl
from feedline.cli.doctor import machine
from feedline.cli.top.reading import read_all

pytestmark = [
    pytest.mark.alone,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
COPIED: dict[str, Any] = {"num_workers": 2, "worker_method": "process", "persistent_workers": True, "device": "cuda"}

AHEAD = {"num_workers": 1, "worker_method": "thread"}


def cycles(seconds: float) -> int:
    """Clock cycles of the device in this time."""
    torch.cuda._sleep(1000)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    torch.cuda._sleep(20_000_000)
    ended.record()
    ended.synchronize()
    return int(20_000_000 / (begun.elapsed_time(ended) / 1e3) * seconds)


def numbers(batches: int, nbytes: int) -> TensorDataset:
    """Rows for batches of two."""
    return TensorDataset(torch.arange(batches * nbytes // 8).view(2 * batches, -1))


def test_nvml_shows_everywhere(tmp_path: Path) -> None:
    busy = cycles(0.02)
    deadline_s = time.monotonic() + 3
    with (
        fl.serve_metrics(0, "127.0.0.1") as server,
        fl.DataLoader(numbers(16, MIB), 2, log=tmp_path / "run.jsonl", **COPIED) as loader,
    ):
        seen, top, scraped = list[float | None](), list[Any](), ""
        while time.monotonic() < deadline_s:
            for _ in loader:
                torch.cuda._sleep(busy)
                torch.cuda.synchronize()
                seen.append(loader.stats().gpu_utilization)
                top = top or [use for page in read_all(os.getpid()) if (use := page.figures.get("gpu_utilization"))]
            with urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
                scraped = answer.read().decode()
        notes, later = str(loader.report()), loader.stats().gpu_utilization
    known = [each for each in seen if each is not None]
    problem = machine.nvml_utilization(0)
    assert known, f"NVML: {problem}"
    assert max(known) >= 0.5, f"{max(known)} of a second was the most in use, of kernels without a pause; {problem}"
    assert later == known[-1] or later in known, (later, known[-3:])
    assert "The GPU was in use for" in " ".join(notes.split()), notes
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    logged = [line["gpu_utilization"] for line in lines if line.get("gpu_utilization") is not None]
    assert logged, lines[-1:]
    assert max(logged) >= 0.5, logged
    assert any(top), top
    shown = [line for line in scraped.splitlines() if line.startswith("feedline_gpu_utilization{")]
    assert any(float(line.rpartition(" ")[2]) > 0.3 for line in shown), shown


def test_a_reading_of_nvml_is_short() -> None:
    torch.ones(1, device="cuda")
    machine.nvml_utilization(0)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        share, problem = machine.nvml_utilization(0)
        times.append(time.perf_counter() - started)
        assert share is not None, problem
    assert sorted(times)[10] < 0.03, [f"{1e3 * each:.2f} ms" for each in sorted(times)]  # read once a second at most


def test_doctor_names_the_device_and_its_use() -> None:
    finding = list(machine.cuda())[0]  # noqa: RUF015 - all findings are made
    assert torch.cuda.get_device_name(0) in finding.evidence
    assert "in use for" in finding.evidence, finding


def traced(tmp_path: Path, batches: int, nbytes: int, step_s: float) -> list[dict[str, Any]]:
    """The events of torch's profiler during a loop."""
    long = cycles(step_s)
    file = tmp_path / "trace.json"
    delivery = fl.Delivery("cuda", transform=list)  # a range without kernels
    with (
        warnings.catch_warnings(),
        fl.DataLoader(numbers(batches, nbytes), 2, **{**COPIED, "device": delivery}) as loader,
    ):
        warnings.simplefilter("ignore")  # the profiler warns of itself
        for _ in loader:  # workers have started, and memory is page-locked
            torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in loader:
                torch.cuda._sleep(long)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(file))
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def overlap_us(one: dict[str, Any], others: list[dict[str, Any]]) -> float:
    start, end = one["ts"], one["ts"] + one["dur"]
    return sum(max(0.0, min(end, other["ts"] + other["dur"]) - max(start, other["ts"])) for other in others)


def test_copies_run_under_the_kernels_of_the_step(tmp_path: Path) -> None:
    events = traced(tmp_path, batches=12, nbytes=8 * MIB, step_s=0.004)
    copies = [each for each in events if each.get("cat") == "gpu_memcpy" and each["args"]["bytes"] > MIB]
    kernels = [each for each in events if each.get("cat") == "kernel"]
    kinds = sorted({str(each.get("cat")) for each in events})
    assert len(copies) == 12, f"{len(copies)} copies of more than 1 MiB; categories of events: {kinds}"
    names = {each["name"] for each in copies}
    assert all("Pinned" in name for name in names), names
    streams = [{each["args"]["stream"] for each in group} for group in (copies, kernels)]
    assert streams[0].isdisjoint(streams[1]), f"copies on {streams[0]}, kernels on {streams[1]}"
    hidden = sum(overlap_us(copy, kernels) for copy in copies) / sum(copy["dur"] for copy in copies)
    assert hidden >= 0.7, f"{hidden:.2f} of the copying ran under kernels; copies take {[c['dur'] for c in copies]} us"
    ranges = {each["name"] for each in events if each.get("cat") == "user_annotation"}
    assert ranges.issuperset(RANGES), sorted(ranges)


RANGES = ("feedline.copy", "feedline.deliver", "feedline.transform")
"""Ranges of a batch, each once."""


INJECTION = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef void (*Function)(void);
typedef struct {
  size_t size;
  int (*table)(int module, Function ***functions, unsigned *count);
} Callbacks;
enum { CALLBACKS = 1, CORE = 1, RANGE_PUSH = 9 };  /* nvtxTypes.h */
static FILE *names;
static int push(const char *name) {
  fprintf(names, "%s\n", name);
  fflush(names);
  return 0;
}
int InitializeInjectionNvtx2(const void *(*find)(uint32_t)) {
  const Callbacks *callbacks = find(CALLBACKS);
  Function **functions;
  unsigned count;
  names = fopen(getenv("NVTX_NAMES"), "w");
  if (!names || !callbacks || !callbacks->table(CORE, &functions, &count) || count <= RANGE_PUSH) return 0;
  *functions[RANGE_PUSH] = (Function)push;
  return 1;
}
"""
"""A tool of NVTX, as Nsight is one: it writes the names of ranges to a file."""

EMITTING = """
import torch, feedline as fl
torch.ones(1, device="cuda")
delivery = fl.Delivery("cuda", transform=lambda batch: batch + 1)
with fl.DataLoader(range(12), batch_size=4, device=delivery) as loader:
    list(loader)
    with torch.autograd.profiler.emit_nvtx():
        assert len(list(loader)) == 3
"""


def test_ranges_reach_a_tool_of_nvtx(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "tool.c").write_text(INJECTION)
    tool, names = tmp_path / "tool.so", tmp_path / "names.txt"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tool), str(tmp_path / "tool.c")], check=True)
    variables = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "NVTX_NAMES": str(names)}
    run = subprocess.run(
        [sys.executable, "-c", EMITTING], env=variables, check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert names.exists(), f"NVTX did not load the tool; {run.stderr}"
    pushed = names.read_text().splitlines()
    counts = {name: sum(name in each for each in pushed) for name in RANGES}
    assert counts == dict.fromkeys(RANGES, 3), f"{counts} of {len(pushed)}: {pushed[:40]}"


class PageLocked(Dataset[torch.Tensor]):
    """One batch in page-locked memory, again and again: only the bus takes time."""

    def __init__(self, nbytes: int, length: int) -> None:
        self.batch, self.length = torch.ones(nbytes // 4).pin_memory(), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.length:
            raise IndexError(index)
        return self.batch


def test_the_verdict_names_the_bus() -> None:
    torch.empty(1 << 29, dtype=torch.uint8, device="cuda")  # the allocator keeps it
    with fl.DataLoader(PageLocked(64 * MIB, 400), batch_size=None, device="cuda", **AHEAD) as loader:
        for batch in loader:
            batch[:1].sum().item()
        verdict, stats = loader.report(), loader.stats()
    figures = (
        f"{stats.copied_nbytes / stats.copy_s / 1e9:.0f} GB/s, hid {stats.hidden_copy_s:.3f} of {stats.copy_s:.3f} s,"
        f" staged {stats.staged_nbytes} of {stats.copied_nbytes} bytes, {stats.wall_s:.3f} s in all\n{verdict}"
    )
    assert stats.copied_nbytes == 400 * 64 * MIB, figures
    assert stats.staged_nbytes == 0, figures
    assert verdict.limiting_stage == "copy", figures
    assert any("uint8" in advice.text for advice in verdict.advice), figures


def test_copies_are_hidden_by_long_steps_and_exposed_by_short_ones() -> None:
    shares = {}
    for name, step_s in (("long", 0.01), ("short", 0.0)):
        long = cycles(step_s)
        with fl.DataLoader(PageLocked(64 * MIB, 60), batch_size=None, device="cuda", **AHEAD) as loader:
            for batch in loader:
                torch.cuda._sleep(long)
                batch[:1].sum().item()
            stats = loader.stats()
        shares[name] = stats.hidden_copy_s / stats.copy_s
    assert shares["long"] >= 0.9, shares
    assert shares["short"] <= 0.7, shares
