"""Single requests over plain HTTP, for what obstore does not tell: how long the server asks to be left alone."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from feedline.stores.failures import THROTTLED
from feedline.stores.problems import TransientError
from feedline.stores.protocol import Span


class PlainAnswer(NamedTuple):
    """The bytes that came, and the entity tag and size of their object."""

    data: bytes
    etag: str
    size: int


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the signature along."""

    def redirect_request(self, *_: object) -> None:
        return None


def ask(address: str, span: Span, timeout_s: float) -> PlainAnswer | None:
    """The range; None where plain HTTP is not enough, so that obstore is asked once more.

    TransientError for an answer that asks to wait, with `wait_s`, and for broken connections. `address` may be a
    signed one: it shows in no exception.
    """
    request = Request(address, headers={"Range": f"bytes={span.start}-{span.stop - 1}"})  # noqa: S310 - see caller
    with _answered(request, timeout_s) as answer:
        if answer is not None and answer.status == http.HTTPStatus.PARTIAL_CONTENT:
            etag, size = answer.headers.get("ETag"), answer.headers.get("Content-Range", "").rpartition("/")[2]
            if etag and size.isdecimal():
                return PlainAnswer(answer.read(), etag, int(size))
    return None


def ask_size(address: str, timeout_s: float) -> PlainAnswer | None:
    """As `ask`, about the object as a whole, and without its bytes."""
    request = Request(address, method="HEAD")  # noqa: S310 - see caller
    with _answered(request, timeout_s) as answer:
        if answer is not None and answer.status == http.HTTPStatus.OK:
            etag, size = answer.headers.get("ETag"), answer.headers.get("Content-Length", "")
            if etag and size.isdecimal():
                return PlainAnswer(b"", etag, int(size))
    return None


@contextmanager
def _answered(request: Request, timeout_s: float) -> Iterator[Any]:
    """A block for the answer, or for None where it is none to read."""
    failure: TransientError | None = None
    try:
        with build_opener(_NoRedirects, ProxyHandler()).open(request, timeout=timeout_s) as answer:
            yield answer
            return
    except HTTPError as error:
        if error.code in THROTTLED:
            failure = TransientError(f"status {error.code}", throttled=True, wait_s=wait_told(error.headers) or 0.0)
        error.close()
    except (URLError, OSError, http.client.HTTPException) as error:
        failure = TransientError(f"the connection broke ({type(error).__name__})")
    if failure is not None:
        raise failure
    yield None


def wait_told(headers: Message, now: datetime | None = None) -> float | None:
    """The seconds of a Retry-After header, which holds a number or a date; None where it holds neither."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
