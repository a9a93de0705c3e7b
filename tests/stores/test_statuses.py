"""Answers of servers without data: those that are retried, and the errors for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_servers import Handler, WebServer, serving

from feedline import stores
from feedline.errors import TransientError
from feedline.stores.statuses import ErrorResponse, error_for

QUICK = stores.Retry(attempts=2, first_wait_s=0, max_wait_s=0)
ONCE = stores.Retry(attempts=1)


@given(st.integers(500, 599), st.sampled_from(["", "InternalError", "NotImplemented", "Unknown"]))
def test_every_status_of_a_failing_server_is_transient(status: int, code: str) -> None:
    error = error_for(ErrorResponse(status, code), "x")
    assert isinstance(error, TransientError)
    assert error.throttled == (status == 503)


@pytest.mark.parametrize("status", [408, 409, 425, 429])
def test_other_statuses_that_pass(status: int) -> None:
    error = error_for(ErrorResponse(status), "x")
    assert isinstance(error, TransientError)
    assert error.throttled == (status == 429)


@pytest.mark.parametrize(
    ("status", "code", "throttled"),
    [
        (400, "SlowDown", True),
        (400, "Throttling", True),
        (400, "ThrottlingException", True),
        (400, "RequestLimitExceeded", True),
        (400, "BandwidthLimitExceeded", True),
        (403, "RequestThrottled", True),
        (400, "RequestTimeout", False),
        (400, "InternalError", False),
        (409, "OperationAborted", False),
        (409, "ConditionalRequestConflict", False),
    ],
)
def test_codes_that_are_transient_for_every_status(status: int, code: str, throttled: bool) -> None:
    error = error_for(ErrorResponse(status, code), "x")
    assert isinstance(error, TransientError)
    assert error.throttled == throttled


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (404, "NoSuchKey", stores.ObjectNotFoundError, "no such object"),
        (410, "", stores.ObjectNotFoundError, "no such object"),
        (404, "NoSuchBucket", stores.ObjectNotFoundError, "no such bucket .*check its name, and the region"),
        (404, "ContainerNotFound", stores.ObjectNotFoundError, "no such bucket"),
        (403, "SignatureDoesNotMatch", stores.AccessDeniedError, "secret key does not belong"),
        (403, "InvalidAccessKeyId", stores.AccessDeniedError, "does not know the access key"),
        (403, "AccessDenied", stores.AccessDeniedError, r'may not read it .*options=\{"request_payer": True\}'),
        (403, "", stores.AccessDeniedError, "makes the requester pay"),
        (401, "", stores.AccessDeniedError, "refuses the credentials"),
        (409, "PublicAccessNotPermitted", stores.AccessDeniedError, "without credentials"),
        (400, "UserProjectMissing", stores.AccessDeniedError, "the requester pays for this bucket"),
        (400, "ExpiredToken", stores.AccessDeniedError, "credentials have expired .*renew them"),
        (403, "InvalidObjectState", stores.StoreError, "is archived .*Glacier.* Restore it first"),
        (409, "BlobArchived", stores.StoreError, "is archived .* Restore it first"),
        (301, "PermanentRedirect", stores.RegionError, "bucket is in another region"),
        (307, "", stores.RegionError, "bucket is in another region"),
        (400, "", stores.StoreError, "check the address"),
        (412, "", stores.ObjectChangedError, "no longer the object"),
        (416, "InvalidRange", stores.RangeError, "ends before this range"),
    ],
)
def test_answers_that_stay(status: int, code: str, kind: type[Exception], words: str) -> None:
    error = error_for(ErrorResponse(status, code), "s3://b/k")
    assert type(error) is kind
    with pytest.raises(kind, match=f"s3://b/k: .*{words}"):
        raise error


def test_the_right_region_is_named() -> None:
    error = error_for(ErrorResponse(400, "AuthorizationHeaderMalformed", "eu-west-1"), "s3://b/k")
    with pytest.raises(stores.StoreError, match=r'in the region eu-west-1 .*options=\{"region": "eu-west-1"\}'):
        raise error


class Refusing(Handler):
    """Answers `/b/STATUS/CODE` with that status and code; a region as S3 names it.

    /b/loop/* redirects to itself, and /b/206/* sends four bytes of three.
    """

    def do_GET(self) -> None:
        _, status, code = [*urlsplit(self.path).path.strip("/").split("/", 2), "301", ""][:3]  # the bucket itself
        self.state["asked"] += 1
        body = f"<Error><Code>{code}</Code><Region>eu-west-1</Region></Error>".encode() if code != "none" else b""
        headers = {"loop": {"Location": self.path}, "301": {"x-amz-bucket-region": "eu-west-1"}}
        headers["206"] = {"Content-Range": "bytes 0-2/9", "ETag": '"x"'}
        body = b"abcd" if status == "206" else body
        self.answer(302 if status == "loop" else int(status), body, headers.get(status))


Server = WebServer[Counter[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Refusing, Counter[str]()) as listening:
        yield listening


def opened(server: Server, retry: stores.Retry) -> stores.Store:
    options = {
        "endpoint": server.url,
        "access_key_id": "key",
        "secret_access_key": "secret",
        "region": "us-east-1",
    }
    return stores.open_store("s3://b", options=options, retry=retry)


@pytest.mark.parametrize(
    "answer", ["507/none", "509/none", "520/none", "530/none", "400/SlowDown", "409/OperationAborted"]
)
def test_transient_failures_are_retried(server: Server, answer: str) -> None:
    before = server.state["asked"]
    with pytest.raises(stores.StoreUnavailableError, match=f"2 attempts failed .*status {answer[:3]}"):
        opened(server, QUICK).read(answer, 0, 3)
    assert server.state["asked"] == before + 2


def test_an_answer_that_is_too_long_is_dropped(server: Server) -> None:
    """Its bytes would otherwise count as received, and the next request would begin behind the range."""
    with pytest.raises(stores.StoreUnavailableError, match=r"2 attempts failed .*more bytes than .*, 4 instead of 3"):
        opened(server, QUICK).read("206/none", 0, 3)


@pytest.mark.parametrize(
    ("answer", "words", "whole"),
    [
        ("301/PermanentRedirect", "the bucket is in the region eu-west-1 .*AWS_REGION", True),
        ("400/AuthorizationHeaderMalformed", "the bucket is in the region eu-west-1", False),
        ("403/InvalidObjectState", "the object is archived", True),
        ("403/InvalidObjectState", "the object is archived", False),
        ("loop/none", "redirects this address in a circle", False),
    ],
)
def test_permanent_failures_name_the_remedy(server: Server, answer: str, words: str, whole: bool) -> None:
    with pytest.raises(stores.StoreError, match=f"s3://b/{answer}.*: .*{words}") as caught:
        opened(server, ONCE).read(answer, 0, None if whole else 3)
    assert not isinstance(caught.value, stores.AccessDeniedError)


def test_a_key_that_reads_like_an_error_is_none(server: Server) -> None:
    with pytest.raises(stores.ObjectNotFoundError):
        opened(server, ONCE).read("404/BareRedirect TooManyRedirects,", 0, 3)


def test_a_lookup_elsewhere_says_so_too(server: Server) -> None:
    with pytest.raises(stores.StoreError, match="the bucket is in the region eu-west-1"):
        opened(server, ONCE).size("301/PermanentRedirect")
