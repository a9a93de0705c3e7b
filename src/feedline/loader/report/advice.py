"""Advice with predicted gains: arguments of the loader, and changes of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from feedline.core.stage_parts import DECODE, TRANSFORM
from feedline.loader.report.context import Context, method_of
from feedline.loader.report.copies import cheaper_transform, fewer_bytes, less_decoding, one_copy
from feedline.loader.report.doubts import begins_to_accelerate, doubtful_cases
from feedline.loader.report.model import Case, Gain, Model
from feedline.loader.report.padded_rows import longest_of_a_batch, samples_of_one_length
from feedline.loader.report.parts import dominant_part
from feedline.loader.report.remedy import LEAST_GAIN, Advice, Basis, upper_bound
from feedline.loader.report.replay import INLINE, PROCESS, THREAD, BatchTimes, EngineSetting, Task
from feedline.loader.report.sources import SHOWS_CALLS, LineShare, SampleSource
from feedline.loader.report.stats import Stats, count, seconds, share, size
from feedline.loader.report.step_threads import fewer_step_threads, mention_of_step_threads
from feedline.workers.registry import find_pool

ENOUGH_SHARE = 0.95
"""Share of the best gain that is enough to advise a smaller change."""


WORKER_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Worker counts that are replayed."""


MOST_SHOWN = 5


MOSTLY_WAITING_SHARE = 0.5
"""Share of waiting above which the gain of more workers is uncertain: a server or lock may serve one at a time."""


def advise(model: Model, stats: Stats) -> tuple[Advice, ...]:
    """Find changes that gain at least `LEAST_GAIN`, sorted.

    Predictions of at least `_LITTLE_GAIN` come first. Then a bound counts half of its gain, because one may get only a
    part; a prediction that may also be a loss counts with its least gain, too. Among changes that are equal to one
    decimal, the cheapest comes first: memory, then processes, then the order.
    """
    found = [advice for find in _REMEDIES for advice in find(model, stats) if not model.context.has(advice.arguments)]
    worth = [advice for advice in found if advice.gain >= LEAST_GAIN]
    worth.sort(key=_rank)
    return tuple(worth[:MOST_SHOWN])


def _rank(advice: Advice) -> tuple[bool, float, bool]:
    is_bound = advice.basis == "bound"
    counted = (1 + advice.gain) / 2 if is_bound else advice.gain
    if not is_bound and advice.low < _LOSS:
        counted = (counted + advice.low) / 2
    return is_bound or counted < _LITTLE_GAIN, -round(counted, 1), is_bound


_LOSS = 0.9
"""Least gain below which a change may make the loop slower."""


_LITTLE_GAIN = 1.25
"""Predicted gain below which a change may come after bounds."""


def _advice(
    model: Model,
    case: Case,
    text: str,
    arguments: Mapping[str, Any],
    *others: Case,
    basis: Basis = "replayed",
) -> Iterator[Advice]:
    """Advice for a case; none where the gain is too small."""
    if model.gain(case) >= LEAST_GAIN:
        gain = model.range_of(case, *others)
        yield Advice(text, dict(arguments), *gain, basis=basis)


def more_or_fewer_workers(model: Model, stats: Stats) -> Iterator[Advice]:
    """The fewest workers with nearly the best gain, or most of it."""
    context = model.context
    if not context.shards_itself or context.together or context.adapts:
        return
    cases = {number: _with_workers(model, number) for number in _counts(context, stats)}
    gains = {number: model.gain(case) for number, case in cases.items()}
    best = max(gains.values(), default=1.0)
    wanted = next((number for number, gain in gains.items() if gain >= ENOUGH_SHARE * best), None)
    if wanted is None or best < LEAST_GAIN:
        return
    half = next((number for number, gain in gains.items() if gain - 1 >= 0.6 * (best - 1)), wanted)
    for number in dict.fromkeys((wanted, half)):
        text = _reason_for_workers(model, number) + _mention_of_kernels(model, cases[number])
        text += mention_of_step_threads(model, number)
        yield from _advice(model, cases[number], text, {"num_workers": number}, *doubtful_cases(model, cases[number]))


def _mention_of_kernels(model: Model, case: Case) -> str:
    if not begins_to_accelerate(model, case):
        return ""
    return "; worker processes also decode Pillow's JPEGs by feedline's kernels, which may gain as much again"


def _counts(context: Context, stats: Stats) -> list[int]:
    """Numbers of workers to replay.

    In a short epoch each of them must have something to do, and a few batches do not show the effect of many workers.
    """
    limits = [context.most_workers or WORKER_COUNTS[-1], max(stats.batches, 2)]
    if context.epoch_batches is not None:
        limits.append(max(context.epoch_batches // _LEAST_EACH, 2))
    return [number for number in WORKER_COUNTS if number <= min(limits) and number != context.num_workers]


_LEAST_EACH = 2
"""Batches of an epoch for each worker that is advised."""


def _with_workers(model: Model, number: int) -> Case:
    context, setting = model.context, model.present.setting
    if setting.method != INLINE:
        return model.with_setting(replace(setting, num_workers=number))
    method = method_of(context.pool_with_workers)
    return model.with_setting(
        EngineSetting(number, 2, context.in_order, method, context.round_robin and method == PROCESS)
    )


def _reason_for_workers(model: Model, number: int) -> str:
    measured, workers = model.measured, model.present.setting.num_workers
    work = [measured.mean(stage) for stage in ("fetch", "collate", "serialize")]
    alone_s, waits_s = sum(task.alone_s for task in work), sum(task.wait_s for task in work)
    if number < workers:
        return f"{count(number, 'worker')} keep up, and leave CPUs to the step"
    waiting = share(waits_s / alone_s) if alone_s else "0 %"
    doing = "workers overlap this with the step" if not workers else f"{count(number, 'batch')} at once, not {workers}"
    if waits_s > MOSTLY_WAITING_SHARE * alone_s and number > max(workers, 1):
        doing += f", if what they wait for serves {number} at once"
    if number > model.context.cpus and waits_s > MOSTLY_WAITING_SHARE * alone_s:
        doing += "; they hardly need CPUs, so ignore torch's warning about their number"
    return f"a batch takes {seconds(alone_s)} to build, {waiting} of it waiting; {doing}"


def shared_stream(model: Model, stats: Stats) -> Iterator[Advice]:
    """Workers for a stream that each worker would now read whole."""
    if model.context.shards_itself:
        return
    cases = {number: _with_workers(model, number) for number in _counts(model.context, stats)}
    gains = {number: model.gain(case) for number, case in cases.items()}
    number = next(number for number, gain in gains.items() if gain >= ENOUGH_SHARE * max(gains.values()))
    text = (
        "shard the stream by get_worker_info() in __iter__, or by feedline.PartitionedDataset: now every worker "
        f"would read all samples; then {count(number, 'worker')}"
    )
    gain = Gain(*model.range_of(cases[number]))
    yield Advice(text, {}, gain.gain, 1.0, gain.high, "bound")


def deeper_prefetch(model: Model, _: Stats) -> Iterator[Advice]:
    """More batches ahead, to hide a slow one."""
    setting = model.present.setting
    if setting.method == INLINE:
        return
    cases = {
        factor: model.with_setting(replace(setting, prefetch_factor=factor))
        for factor in (setting.prefetch_factor * step for step in (2, 4, 8))
    }
    gains = {factor: model.gain(case) for factor, case in cases.items()}
    factor = next(factor for factor, gain in gains.items() if gain >= ENOUGH_SHARE * max(gains.values()))
    ahead = factor * setting.num_workers
    text = f"{ahead} batches ahead, not {setting.ahead}, cover the slow ones"
    yield from _advice(model, cases[factor], text, {"prefetch_factor": factor})


def any_order(model: Model, _: Stats) -> Iterator[Advice]:
    """Delivery of batches as they finish."""
    setting = model.present.setting
    if setting.method == INLINE or not setting.in_order:
        return
    text = "delivers batches as they finish, if the order need not be exact"
    yield from _advice(model, model.with_setting(replace(setting, in_order=False)), text, {"in_order": False})


def persistent_workers(model: Model, _: Stats) -> Iterator[Advice]:
    """Workers that stay from epoch to epoch."""
    context = model.context
    if model.present.setting.method == INLINE or context.persistent_workers or context.epoch_batches is None:
        return
    epoch = count(context.epoch_batches, "batch")
    text = f"each epoch of {epoch} waits {seconds(model.startup_s)} for its workers to start"
    yield Advice(text, {"persistent_workers": True}, *_without_startup(model), "measured")


def _without_startup(model: Model) -> Gain:
    gain = model.without_startup()
    return Gain(gain, 1 + 0.7 * (gain - 1), 1 + 1.1 * (gain - 1))


def other_pools(model: Model, _: Stats) -> Iterator[Advice]:
    """Threads, processes, or no workers at all."""
    context, setting = model.context, model.present.setting
    if setting.method == PROCESS and context.thread_safe and not context.together:
        case = model.with_setting(replace(setting, method=THREAD, round_robin=False))
        text = "threads send nothing between processes"
        yield from _advice(model, case, text, {"worker_method": "thread"}, *doubtful_cases(model, case))
    if setting.method == THREAD and not context.together:
        case = model.with_setting(replace(setting, method=PROCESS, round_robin=context.round_robin))
        text = f"threads share Python's lock, and compute on {model.measured.concurrency:.1f} CPUs together"
        yield from _advice(model, case, text, {"worker_method": "process"}, *doubtful_cases(model, case))
    if setting.method != INLINE and not context.adapts:
        sent_s = sum(model.measured.mean(stage).alone_s for stage in ("serialize", "receive")) + model.machine.latency_s
        text = f"a batch costs {seconds(sent_s)} on its way from the worker, and {_building(model)} to build"
        text += "; worker_init_fn does not run then" if context.initializes else ""
        case = model.with_setting(EngineSetting())
        yield from _advice(model, case, text, {"num_workers": 0}, *doubtful_cases(model, case))


def _building(model: Model) -> str:
    return seconds(sum(model.measured.mean(stage).alone_s for stage in ("fetch", "collate")))


def faster_sampler(model: Model, _: Stats) -> Iterator[Advice]:
    """A sampler that takes no time."""
    name = model.context.sampler
    answer = next((text for part, text in _SAMPLERS.items() if part in name.lower()), _SAMPLERS[""])
    draws = f"{name or 'the sampler'} takes {seconds(model.measured.mean('sample').alone_s)} a batch"
    yield from upper_bound(model, "sample", f"{answer}: {draws} in the training process, where no worker helps")


_SAMPLERS = {
    "weighted": "feedline.samplers.Weighted(weights, seed=...)",
    "bucket": "feedline.samplers.LengthBuckets(lengths, ...)",
    "distributed": "distributed='auto' in place of the sampler",
    "": "draw the order of an epoch at once, as an array",
}


def cheaper_collate(model: Model, stats: Stats) -> Iterator[Advice]:
    """A collate function that takes no time."""
    name, takes = model.context.collate_fn, f"takes {seconds(model.measured.mean('collate').alone_s)} a batch"
    if name:
        text = (
            f"a cheaper {name}: it {takes}; let the dataset return arrays, and only stack or pad them there "
            "(feedline.collate)"
        )
    else:
        copied = f" of {size(stats.delivered_nbytes)}" if stats.delivered_nbytes else ""
        text = (
            "fewer fields, or smaller ones such as uint8 and float16, converted after the loader: the copy of samples "
            f"into a batch{copied} {takes}"
        )
    yield from upper_bound(model, "collate", text)


def fewer_objects(model: Model, _: Stats) -> Iterator[Advice]:
    """Batches that cost nothing to send."""
    sent = [model.measured.mean(stage) for stage in ("serialize", "receive")]
    text = (
        f"return few and large tensors or arrays: packing takes {seconds(sent[0].alone_s)} a batch and unpacking "
        f"{seconds(sent[1].alone_s)}; Python objects are sent one by one"
    )
    case = model.present._replace(change=lambda batch: batch.without("serialize").without("receive"))
    if model.present.setting.method == PROCESS and model.gain(case) >= LEAST_GAIN:
        gain = model.range_of(case)
        yield Advice(text, {}, gain.gain, 1.0, gain.high, "bound")


def cached_objects(model: Model, stats: Stats) -> Iterator[Advice]:
    """A cache for objects that stores send again in every epoch."""
    stores = stats.stores
    looked_up = stores.cache_hits + stores.cache_misses
    if not stores.nbytes or (looked_up and stores.cache_misses < 0.1 * looked_up):
        return
    rate = size(stores.nbytes / max(stats.wall_s, 1e-9))
    text = f"cache= of the dataset: stores send {rate}/s, {count(stores.requests, 'request')} so far"
    if looked_up:
        # No share: a piece that was fetched ahead is found in the cache when it is read.
        pieces = count(stores.cache_misses, "piece")
        text = f"the next epoch: {pieces} had to be fetched into the cache so far, at {rate}/s"
    gain = model.range_of(model.present._replace(change=_without_waiting))
    yield Advice(f"{text}; from the second epoch on they are local", {}, gain.gain, 1.0, gain.high, "bound")


def _without_waiting(batch: BatchTimes) -> BatchTimes:
    fetch = batch.work.get("fetch", Task())
    return replace(batch, work={**batch.work, "fetch": fetch._replace(wait_s=0.0)})


def cheaper_part(model: Model, stats: Stats) -> Iterator[Advice]:
    """A decoder, transform or storage that takes no time."""
    part = dominant_part(stats, "fetch")
    if part is None or model.context.source.own_reader:  # which `cheaper_fetch` names
        return
    dataset, takes = model.context.dataset, f"{share(part.share)} of building a batch is {part.words}"
    answers = {
        DECODE: f"a cheaper decoder for {dataset}: store samples in the size and format in which they are used",
        TRANSFORM: f"a cheaper transform for {dataset}: store its results, or use the device (Delivery(transform=...))",
    }
    answer = answers.get(part.stage, f"faster storage for {dataset}")
    yield from _less_fetching(model, part.share, f"{answer}: {takes}")


def cheaper_fetch(model: Model, stats: Stats) -> Iterator[Advice]:
    """A dataset that takes no time."""
    context, source = model.context, model.context.source
    if dominant_part(stats, "fetch") is not None and not source.own_reader:  # of which `cheaper_part` says more
        return
    # Of these, `less_locking` and `single_threads` say more.
    if (model.is_locked or _may_waste_threads(model)) and not source.own_reader:
        return
    method = f"{context.dataset}.{context.reads_by}"
    if source.own_reader:
        where = f" ({source.where})" if source.where else ""
        text = f"{source.own_reader}: {method} uses {source.call}{where}"
        yield from _less_fetching(model, 1 - _other_share(model), text)
        return
    if context.fetches_many or context.reads_by != "__getitem__":
        text = f"do less in {method}: decode only what is used, and store results that never change"
    else:
        text = (
            f"do less in {method}, or fetch many samples at once: __getitems__, or feedline.datasets.ArrayFile for "
            "rows of arrays"
        )
    yield from upper_bound(model, "fetch", text)


def costliest_line(model: Model, _: Stats) -> Iterator[Advice]:
    """The line that takes most of a fetch, without its time.

    No advice where the line belongs to the way of reading that other advice replaces, or takes long only because
    threads outnumber the CPUs.
    """
    source = model.context.source
    line = next((line for line in model.context.lines if line.stage == "fetch" and line.is_own), None)
    if line is None or (source.own_reader and not _is_other(line, source)) or _may_waste_threads(model):
        return
    text = f"do less in {line.where}, {share(line.share)} of building a batch: {line.text}"
    yield from _less_fetching(model, _share_of_fetch(model, line.share), text)


def _less_fetching(model: Model, part: float, text: str) -> Iterator[Advice]:
    """Advice to remove a part of the fetch, if worthwhile."""
    case = model.present._replace(change=lambda batch: batch.scale("fetch", 1 - part))
    if model.gain(case) >= LEAST_GAIN:
        gain = model.range_of(case)
        yield Advice(text, {}, gain.gain, 1.0, gain.high, "bound")


def _other_share(model: Model) -> float:
    """Share of the fetch in lines without the reading library.

    0 if it is not known whether any line calls it.
    """
    lines, source = model.context.lines, model.context.source
    is_called = any(line.library == source.library or line.where == source.where for line in lines)
    if not is_called and source.library not in SHOWS_CALLS:
        return 0.0
    others = (line.share for line in lines if line.stage == "fetch" and _is_other(line, source))
    return _share_of_fetch(model, sum(others))


def _is_other(line: LineShare, source: SampleSource) -> bool:
    """True for a line that does not call the library that reads.

    A line that runs no Python code of any library may call C code of that one.
    """
    is_known = bool(line.library) or source.library in SHOWS_CALLS
    return is_known and line.library != source.library and line.where != source.where


def _share_of_fetch(model: Model, part: float) -> float:
    """A share of fetching and collating, as one of fetching."""
    fetch_s, collate_s = (model.measured.mean(stage).alone_s for stage in ("fetch", "collate"))
    return min(part * (fetch_s + collate_s) / fetch_s, 1.0) if fetch_s else 0.0


def less_locking(model: Model, stats: Stats) -> Iterator[Advice]:
    """A lock that workers do not hold for long."""
    if not model.is_locked:
        return
    present = model.context.num_workers
    cases = {number: model.unlocked(_with_workers(model, number)) for number in _counts(model.context, stats)}
    gains = {number: model.gain(case) for number, case in cases.items() if number > present}
    best = max(gains.values(), default=1.0)
    number = next((number for number, gain in sorted(gains.items()) if gain >= ENOUGH_SHARE * best), present)
    then = ""
    if best * ENOUGH_SHARE > model.lock_gain:
        then = f"; then {count(number, 'worker')} would make it {gains[number]:.1f} times as fast"
    gain = model.range_of(model.unlocked(model.present))
    text = (
        f"hold the lock in {model.context.dataset}.{model.context.reads_by} for a shorter time, or give each worker "
        f"a file or connection of its own: now they wait for each other {share(model.measured.contended_share)} "
        f"of their time{then}"
    )
    yield Advice(text, {}, gain.gain, 1.0, gain.high, "bound")


def more_cpus(model: Model, _: Stats) -> Iterator[Advice]:
    """All CPUs of the machine, without other programs or a quota."""
    cpus = model.context.cpus
    # Threads of the workers that outnumber the CPUs take them from each other.
    if model.machine.cpus < 0.9 * cpus and not model.is_throttled and not is_oversubscribed(model):
        machine = replace(model.machine, cpus=cpus)
        text = (
            f"{cpus:g} CPUs without other programs: your processes were ready to run but had no CPU for "
            f"{share(model.measured.preempted_share)} of their time"
        )
        yield from _advice(model, model.present._replace(machine=machine), text, {}, basis="bound")
    if model.is_throttled:
        machine = model.twice_the_cpus
        text = f"a CPU quota of {2 * cpus:g}, not {cpus:g}: the system stops this job whenever its quota is used up"
        yield from _advice(model, model.present._replace(machine=machine), text, {}, basis="replayed")


def single_threads(model: Model, _: Stats) -> Iterator[Advice]:
    """One thread per worker, where the workers' own threads outnumber the CPUs.

    Such threads wait for each other, partly by computing, so it is unknown how much of their computing is work. The
    gain is that of a thread that computes as long as now, without its helpers; it may be greater.
    """
    if not _may_waste_threads(model):
        return
    fetch, workers = model.measured.mean("fetch"), model.present.setting.num_workers
    text = (
        "one thread in each worker (torch.set_num_threads(1), cv2.setNumThreads(0), OMP_NUM_THREADS=1): "
        f"{workers} workers with {fetch.width:.1f} threads each share {model.context.cpus:g} CPUs"
    )
    alone = max(1 - model.measured.helpers_share if model.measured.helpers_share else 0.0, 1 / fetch.width)

    def changed(batch: BatchTimes) -> BatchTimes:
        fetch = batch.work.get("fetch", Task())
        single = fetch._replace(cpu_s=alone * fetch.cpu_s * fetch.width, width=1.0)
        return replace(batch, work={**batch.work, "fetch": single})

    gain = model.gain(model.present._replace(change=changed))
    if gain >= LEAST_GAIN:
        yield Advice(text, {}, gain, 1.0, max(gain, model.gain(model.removal("fetch"))), "bound")


def is_oversubscribed(model: Model) -> bool:
    """True if the workers' own threads outnumber the CPUs."""
    width, workers = model.measured.mean("fetch").width, model.present.setting.num_workers
    return bool(workers) and width > _SEVERAL and width * workers > model.context.cpus


def _may_waste_threads(model: Model) -> bool:
    """True if the workers' own threads may compute in vain.

    A thread that only waits for its helpers has given them its work: without them, it computes as much. Helpers that
    share its work, such as those of OpenMP, compute about as long as it does.
    """
    own_share = 1 - model.measured.helpers_share
    return is_oversubscribed(model) and own_share * model.measured.mean("fetch").width > _OWN_PART


_OWN_PART = 0.5
"""Least computing of a worker's own thread, as a share of an equal part, at which helpers share its work."""


_SEVERAL = 1.2
"""Threads that compute at once, on average, above which a worker has several."""


_REMEDIES: tuple[Callable[[Model, Stats], Iterator[Advice]], ...] = (
    persistent_workers,
    deeper_prefetch,
    more_or_fewer_workers,
    shared_stream,
    any_order,
    other_pools,
    less_locking,
    more_cpus,
    single_threads,
    fewer_step_threads,
    samples_of_one_length,
    longest_of_a_batch,
    fewer_bytes,
    one_copy,
    less_decoding,
    cheaper_transform,
    faster_sampler,
    cheaper_collate,
    fewer_objects,
    cached_objects,
    cheaper_part,
    cheaper_fetch,
    costliest_line,
)


def predict(model: Model, arguments: Mapping[str, Any]) -> Gain | None:
    """The gain of other arguments, or None if they are not known."""
    if arguments == {"persistent_workers": True}:
        if model.present.setting.method == INLINE:  # it has no workers to keep
            return None
        return _without_startup(model)
    case = case_of(model, arguments)
    return None if case is None else model.range_of(case, *doubtful_cases(model, case))


def case_of(model: Model, arguments: Mapping[str, Any]) -> Case | None:
    """The loop with other arguments; None for unknown names or values."""
    context, setting = model.context, model.present.setting
    known = {"num_workers", "prefetch_factor", "in_order", "worker_method"}
    if not arguments or not known.issuperset(arguments) or context.together:
        return None
    number = arguments.get("num_workers", context.num_workers)
    factor = arguments.get("prefetch_factor", setting.prefetch_factor)
    factor = 2 if factor is None else factor
    if not (_is_number(number, 0) and _is_number(factor, 1)):
        return None
    if number == 0:
        return model.with_setting(EngineSetting())
    if not context.shards_itself:
        return None
    chosen = arguments.get("worker_method")
    kind = context.pool_with_workers if chosen in (None, "auto") else find_pool(chosen)
    method = method_of(kind)
    number = min(number, context.most_workers or number)  # others would get no partition
    in_order = arguments.get("in_order", context.in_order)
    changed = EngineSetting(number, factor, in_order, method, context.round_robin and method == PROCESS)
    return model.with_setting(changed)


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
