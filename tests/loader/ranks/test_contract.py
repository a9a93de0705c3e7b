"""Ranks that contradict each other are named at the start of an epoch; unequal numbers of batches cause no hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diagonals import diagonal
from preloaded import Preloaded

import feedline as fl
from feedline.loader.ranks.contract import RankPolicy, Terms, compare

SCRIPT = Path(__file__).with_name("contract_ranks.py")
WORLD = 3

TERMS = Terms("TensorDataset", "samples", 1_000, "Shuffled(n=1000, seed=0)", 0, None, 8, 32, False, 2, (640, ()))
DIFFERENCES = {
    "dataset": "Copy", "kind": "batches", "length": 999, "order": "Sequential(n=1000)", "seed": 1, "listing": "a1",
    "world_size": 4, "batch_size": 16, "drop_last": True, "epoch": 3, "position": (672, ()),
}  # fmt: skip


@pytest.mark.parametrize(("field", "odd"), diagonal([*DIFFERENCES], [0, 5]))
def test_the_odd_rank_is_named_with_what_differs(field: str, odd: int) -> None:
    other = TERMS._replace(**{field: DIFFERENCES[field]})
    ranks = [(rank, other if rank == odd else TERMS) for rank in range(8)]
    with pytest.raises(fl.errors.RankError) as raised:
        compare(ranks)
    said = str(raised.value)
    assert f"{json.dumps(DIFFERENCES[field])} on rank {odd}, but" in said
    assert "on the other ranks" in said
    assert said.count(" is ") == 1, "only what differs is named"


def test_two_ranks_that_differ_are_both_named() -> None:
    with pytest.raises(fl.errors.RankError, match="seed is 0 on rank 0, but 1 on rank 1"):
        compare([(0, TERMS), (1, TERMS._replace(seed=1))])


def test_ranks_that_read_the_same_share_are_named() -> None:
    with pytest.raises(fl.errors.RankError, match="ranks 1, 3 all read as rank 1 of 4"):
        compare([(0, TERMS), (1, TERMS), (2, TERMS), (1, TERMS)])


def test_equal_ranks_agree() -> None:
    compare([(rank, TERMS) for rank in range(8)])


def test_a_policy_refuses_unknown_rules() -> None:
    with pytest.raises(fl.errors.ArgumentError, match="'allow', 'raise', 'stop', 'repeat'; got 'join'"):
        RankPolicy(uneven="join")  # type: ignore[arg-type]
    with pytest.raises(fl.errors.ArgumentError, match="wait_s must be above 0"):
        RankPolicy(wait_s=0)


@pytest.fixture(scope="module")
def reported(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The report of each of three ranks of one gloo group, which ran all cases one after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    common, logs = (str(folder / "meeting"), str(WORLD)), [folder / f"{rank}.log" for rank in range(WORLD)]
    ranks = [preloaded.start_quietly(SCRIPT, log, *common, str(rank)) for rank, log in enumerate(logs)]
    try:
        codes = [rank.wait(250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [log.read_text() for log in logs]
    assert not any(codes), said
    return [json.loads(text) for text in said]


def test_equal_loaders_of_all_ranks_share_two_epochs(reported: list[dict[str, Any]]) -> None:
    seen = [index for rank in reported for index in rank["equal"]]
    assert sorted(seen) == sorted(list(range(30)) * 2)


def test_figures_have_the_moment_at_which_all_ranks_began_an_epoch(reported: list[dict[str, Any]]) -> None:
    """Reports compare clocks by it. Processes of one machine have one clock; each may wait for a CPU."""
    names, times_s = zip(*(rank["met"] for rank in reported), strict=True)
    assert set(names) == {"0/1"}, "the second epoch of the first loader"
    assert max(times_s) - min(times_s) < 60


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("seed", "seed is 1 on rank 1, but 0 on the other ranks"),
        ("length", "length is 31 on rank 2, but 30 on the other ranks"),
        ("batch size", "batch size is 6 on rank 0, but 5 on the other ranks"),
        ("position", "position is [15, []] on rank 2, but [0, []] on the other ranks"),
        ("share", "ranks 0, 1 all read as rank 0 of 3"),
        ("stream", 'dataset is "Lanes" on rank 1, but "TensorDataset" on the other ranks'),
    ],
)
def test_every_rank_raises_the_same_error(reported: list[dict[str, Any]], case: str, said: str) -> None:
    for rank in reported:
        assert said in rank[case]


def test_a_rank_that_does_not_come_is_named(reported: list[dict[str, Any]]) -> None:
    assert "rank 2 did not begin this iteration" in reported[0]["absent"]
    assert "rank 2 did not begin this iteration" in reported[1]["absent"]


def test_ranks_of_unequal_length_are_refused_on_all_ranks(reported: list[dict[str, Any]]) -> None:
    for rank in reported:
        assert "rank 2 has no batch left after step 2" in rank["raise"]


def test_all_ranks_stop_with_the_first_one(reported: list[dict[str, Any]]) -> None:
    assert [rank["stop"] for rank in reported] == [[[0, 1], [2, 3]], [[10, 11], [12, 13]], [[20, 21], [22]]]
    assert [rank["stop epoch"] for rank in reported] == [1, 1, 1]


def test_a_rank_that_has_ended_repeats_its_batches(reported: list[dict[str, Any]]) -> None:
    assert reported[0]["repeat"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert reported[1]["repeat"] == [[10, 11], [12, 13], [14, 15], [16], [10, 11]]
    assert reported[2]["repeat"] == [[20, 21], [22], [20, 21], [22], [20, 21]]


def test_a_rank_that_skips_a_whole_batch_does_not_hang_the_others(reported: list[dict[str, Any]]) -> None:
    assert [rank["skip"] for rank in reported] == [[3], [3], [2]]


def test_ranks_that_share_their_data_themselves_may_agree_on_steps(reported: list[dict[str, Any]]) -> None:
    assert [rank["own"] for rank in reported] == [4, 4, 4]
    firsts = list(range(0, 6000, 500))
    assert [rank["own repeat"] for rank in reported] == [firsts[:10] + firsts[:2], firsts[:11] + firsts[:1], firsts]


def test_a_group_ends_with_the_default_group(reported: list[dict[str, Any]]) -> None:
    """A later default group may have the address of this one."""
    assert not any(rank["kept"] for rank in reported)


def test_a_stream_that_divides_its_samples_itself_is_refused(reported: list[dict[str, Any]]) -> None:
    for rank in reported:
        assert all("Sharing looks up 'get_rank', in " in said for said in rank["shares"]), rank["shares"]


def test_a_stream_that_asks_for_its_rank_but_reads_all_is_shared(reported: list[dict[str, Any]]) -> None:
    for of_method in zip(*(rank["speaks"] for rank in reported), strict=True):
        assert sorted(number for numbers in of_method for number in numbers) == list(range(30))
