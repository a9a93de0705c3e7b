"""Answers and data of a server of lines, however the network cuts them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_settings import law_settings

from feedline import errors, streams
from feedline.streams.live.lines import LinesClient

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WITHIN_S)
        yield server


def replies(listening: socket.socket, chunks: list[bytes], first: int = 0) -> Iterator[Any]:
    """What a client gets for each chunk of the answer to `READ first`."""
    client = LinesClient(streams.SocketLines(f"127.0.0.1:{listening.getsockname()[1]}", group="g"))
    try:
        client.seek(0, first)
        connection, _ = listening.accept()
        with connection:
            assert connection.makefile("rb").readline() == b"READ %d\n" % first
            for chunk in chunks:
                connection.sendall(chunk)
                yield from client.poll([0], 1, WITHIN_S)
    finally:
        client.close()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(bounds)]


LINES = st.lists(st.sampled_from([b"ERROR disk full", b"ERROR access", b"ERROR", b"OK", b"", b"- 1", b"\xff\r"]))
CUTS = st.lists(st.integers(0, 200), max_size=8)


@law_settings()
@given(LINES, CUTS, st.integers(0, 9))
def test_lines_of_any_content_arrive_however_they_are_cut(
    listening: socket.socket, lines: list[bytes], places: list[int], first: int
) -> None:
    data = b"".join(line + b"\n" for line in [b"OK", *lines])
    runs = list(replies(listening, cut(data, places), first))
    assert [line for run in runs for line in run.messages] == lines
    assert [place for run in runs for place in run.places] == list(range(first + 1, first + len(lines) + 1))


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (b"ERROR access denied", errors.SourceAccessError, "refuses the credentials: access denied; check token="),
        (b"ERROR no such line", errors.SourceError, r"refuses 'READ 3': no such line"),
        (b"3", errors.SourceError, r"answers 'READ 3' with '3' instead of OK: check servers="),
        (b"\xff", errors.SourceError, r"answers 'READ 3' with .* instead of OK"),
    ],
)
def test_only_the_answer_to_a_request_refuses_it(
    listening: socket.socket, answer: bytes, kind: type[Exception], said: str
) -> None:
    for places in ([], [2], list(range(len(answer) + 3))):
        with pytest.raises(kind, match=said):
            list(replies(listening, cut(answer + b"\n1\n", places), 3))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed the connection instead of answering"), (b"a b\n", "with 'a b' instead of {expected}"),
        (b"\n", "with '' instead of {expected}"), (b"ERROR busy\n", "refuses '{question}': busy"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("ask", "question", "expected"),
    [
        (lambda client: client.retained(0), "KEPT", "two numbers"),
        (lambda client: client.committed(0), "ACKED g", "a number or -"),
        (lambda client: client.commit({0: 3}), "ACK 3 g", "OK"),
    ],
    ids=["kept", "committed", "commit"],
)
def test_answers_that_are_none_are_named(
    listening: socket.socket, ask: Any, question: str, expected: str, answer: bytes, said: str
) -> None:
    client = LinesClient(streams.SocketLines(f"127.0.0.1:{listening.getsockname()[1]}", group="g"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, client)
        connection, _ = listening.accept()
        with connection:
            assert connection.makefile("rb").readline().decode() == f"{question}\n"
            connection.sendall(answer)
        with pytest.raises(errors.SourceError, match=said.format(question=question, expected=expected)):
            asked.result(WITHIN_S)
