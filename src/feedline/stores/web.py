"""Requests to web servers that obstore cannot make.

These are for links with a query, which may be a signature, for names with escapes that are sent as written, and for
bodies without a length. No part of a query is ever shown.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage
from itertools import count as numbers
from time import monotonic
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from feedline.core.caches import LRUCache
from feedline.core.store_metrics import count
from feedline.errors import ArgumentError, NoLengthError, NoRangesError, StoreError, TransientError
from feedline.stores.base import ByteRange, ObjectInfo, unversioned
from feedline.stores.links import encoded, keeps_escapes, split_link
from feedline.stores.obstore_client import WEB, Client, RangeAnswer
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange, check_complete
from feedline.stores.statuses import ErrorResponse, error_for, is_transient

_MOST_NBYTES = 1 << 30
"""The largest body without a length that is read: only the whole body, in memory, has a known size."""


_KEPT_BODIES = 4
"""Number of bodies without a length that are kept, because each range of one would fetch the whole body again."""


_KEPT_S = 30.0
"""Seconds for which a kept body is valid: an object without a length often has no version that would show a change."""


_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


_REGION = re.compile(r"[a-z0-9-]{1,32}")


_PAGES = frozenset({"html", "htm", "xhtml", "php", "asp", "aspx", "jsp", "cgi"})


class _Answer(NamedTuple):
    status: int
    headers: HTTPMessage
    body: Any

    @property
    def span(self) -> tuple[ByteRange, int] | None:
        """The range sent and the object's size; None if unknown."""
        found = _RANGE.fullmatch(self.headers.get("Content-Range", ""))
        if self.status == 206 and found is not None:
            return ByteRange(int(found[1]), int(found[2]) + 1), int(found[3])
        length = self.headers.get("Content-Length", "")
        return (ByteRange(0, int(length)), int(length)) if self.status == 200 and length.isdecimal() else None


class _Body(NamedTuple):
    version: str
    data: memoryview
    read_s: float


class WebReader:
    """Single requests to one web server, one attempt each.

    Safe to use from several threads. `idle_s` is the longest wait for a byte.
    """

    def __init__(self, root: str, options: StoreOptions, idle_s: float) -> None:
        self._root, self._idle_s = root, idle_s
        self._opener = _opener(root, options)
        self._headers = {"Accept-Encoding": "identity", "User-Agent": str(options.get("user_agent", "feedline"))}
        self._bodies: LRUCache[str, _Body] = LRUCache(_KEPT_BODIES)

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version, by a request for the first byte.

        A link may be signed for GET alone.
        """
        try:
            with self._request(key, what, ByteRange(0, 1)) as answer:
                if (known := answer.span) is not None:
                    return ObjectInfo(key, known[1], _version(answer.headers, known[1]))
        except _EmptyError:
            pass  # servers differ in their answers to an empty range
        with self._request(key, what) as answer:
            if (known := answer.span) is not None:
                return ObjectInfo(key, known[1], _version(answer.headers, known[1]))
            body = self._keep_all(key, answer, what)
        return ObjectInfo(key, body.data.nbytes, body.version)

    def get(self, key: str, part: PartialRange, what: str) -> None:
        """Fetch the rest of a range into `part`, as `Client.get` does."""
        kept = self._bodies.get(key)
        if kept is None or monotonic() - kept.read_s > _KEPT_S:
            try:
                with self._request(key, what, part.remaining) as answer:
                    if (known := answer.span) is not None:
                        self._take(answer, known, part, what)
                        return
            except _EmptyError:
                raise error_for(ErrorResponse(416), what) from None
            with self._request(key, what) as answer:
                kept = self._keep_all(key, answer, what)
        stop = min(part.span.stop, kept.data.nbytes)
        if part.remaining.start > stop:
            raise error_for(ErrorResponse(416), what)
        part.accept(kept.version, kept.data.nbytes, ByteRange(part.remaining.start, stop))
        part.add(kept.data[part.remaining.start : stop])

    def whole(self, key: str, what: str) -> RangeAnswer:
        """Read an object of any length without a range request."""
        with self._request(key, what) as answer:
            body = self._read_to_end(answer, what)
        return RangeAnswer(body.data, body.version, body.data.nbytes)

    def _take(self, answer: _Answer, known: tuple[ByteRange, int], part: PartialRange, what: str) -> None:
        (start, stop), size = known
        wanted = part.remaining
        if answer.status == 200 and (wanted.start or size > wanted.stop):
            raise NoRangesError(f"{what}: the server ignores ranges; copy the object to a server that supports them")
        if (start, stop) != (wanted.start, min(wanted.stop, size)):
            raise StoreError(f"{what}: the server answered with bytes [{start}, {stop}) instead")
        part.accept(_version(answer.headers, size), size, ByteRange(start, stop))
        for data in _chunks(answer, part.part_nbytes or stop - start):
            part.add(memoryview(data))
        part.check_complete()

    def _keep_all(self, key: str, answer: _Answer, what: str) -> _Body:
        return self._bodies.put(key, self._read_to_end(answer, what))

    def _read_to_end(self, answer: _Answer, what: str) -> _Body:
        data, known = bytearray(), answer.span
        for chunk in _chunks(answer, 1 << 20):
            data += chunk
            if known is None and len(data) > _MOST_NBYTES:
                raise StoreError(
                    f"{what}: the server does not state the length of the object, and has sent more than "
                    f"{_MOST_NBYTES >> 30} GiB; copy the object to a server that states it"
                )
        check_complete(len(data), len(data) if known is None else known[1])
        return _Body(_version(answer.headers, len(data)), memoryview(data).toreadonly(), monotonic())

    @contextmanager
    def _request(self, key: str, what: str, span: ByteRange | None = None) -> Iterator[_Answer]:
        """Send one request.

        Every failure is raised as an error of feedline, without the query of the address.
        """
        ranged = {} if span is None else {"Range": f"bytes={span.start}-{span.stop - 1}"}
        request = Request(self._address(key), headers={**self._headers, **ranged})  # noqa: S310 - http or https
        for name, value in self._authorization().items():
            request.add_unredirected_header(name, value)  # a redirect may point to another server
        count(requests=1)
        try:
            with self._opener.open(request, timeout=self._idle_s) as response:
                answer = _Answer(response.status, response.headers, response)
                self._check_is_file(answer.headers, key, what)
                yield answer
                return
        except HTTPError as error:
            with error:
                problem = _refusal_error(error, what)
        except TimeoutError:
            problem = TransientError("no answer in time")
        except URLError as error:
            problem = _unreachable_error(error, what)
        except (HTTPException, ConnectionError, ssl.SSLError) as error:
            problem = TransientError(f"the connection broke ({type(error).__name__})")
        if isinstance(problem, TransientError):
            count(throttled=problem.throttled)
        raise problem  # without the foreign exception, whose text may contain the address

    def _check_is_file(self, headers: Any, key: str, what: str) -> None:
        check_is_file(key, headers, what)

    def _authorization(self) -> Mapping[str, str]:
        """Headers that allow a request."""
        return {}

    def _address(self, key: str) -> str:
        path, query = split_link(key)
        return f"{self._root}/{encoded(path, '/~!$&()*+,;=:@')}" + (f"?{query}" if query else "")


class WebClient(Client):
    """Single requests to a web server.

    obstore makes them where it can.
    """

    _checks_headers = True

    def __init__(self, root: str, options: StoreOptions, idle_timeout_s: float) -> None:
        super().__init__(WEB, root, options, idle_timeout_s)
        self._reader = WebReader(root, options, idle_timeout_s)

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object; its path is the key."""
        if not _is_beyond_obstore(key):
            try:
                return super().info(key, what)
            except StoreError:
                pass  # many servers refuse HEAD, or answer it wrongly: only the answer to GET counts
            except TransientError as error:
                if not str(error).startswith("status 501"):
                    raise
        return self._reader.info(key, what)

    def get(self, key: str, part: PartialRange, what: str) -> None:
        """Fetch the rest of a range into `part`, as `Client.get` does."""
        if not _is_beyond_obstore(key):
            with suppress(NoRangesError, NoLengthError):
                super().get(key, part, what)
                return
        self._reader.get(key, part, what)

    def whole(self, key: str, what: str, most: int | None = None) -> RangeAnswer:
        """Read an object without a range request, as `Client.whole` does."""
        if not _is_beyond_obstore(key):
            with suppress(NoLengthError):
                return super().whole(key, what, most)
        return self._reader.whole(key, what)

    def _check_is_file(self, key: str, attributes: Mapping[str, Any], what: str) -> None:
        check_is_file(key, attributes, what)


def _is_beyond_obstore(key: str) -> bool:
    name, query = split_link(key)
    return bool(query) or keeps_escapes(name) or any(part in ("", ".") for part in name.split("/"))


class _EmptyError(Exception):
    """The object has no byte at this offset."""


def _refusal_error(error: HTTPError, what: str) -> Exception:
    if error.code == 416:
        return _EmptyError()
    if 300 <= error.code < 400 and "loop" in str(error.msg):
        return StoreError(
            f"{what}: the server redirects this address in a circle; check the address, and whether it needs a login"
        )
    if error.msg == "insecure":
        return StoreError(f"{what}: the server redirects from https to an address without https; check the address")
    body = b""
    with suppress(OSError, HTTPException):
        body = error.read(4096)
    code = re.search(rb"<Code>([\w.]{1,64})</Code>", body)
    region = error.headers.get("x-amz-bucket-region", "")
    response = ErrorResponse(error.code, code[1].decode() if code else "", region if _REGION.fullmatch(region) else "")
    if error.code in (400, 401, 403) and not is_transient(error.code, response.code) and "?" in what:
        return error_for_link(response, what)
    return error_for(response, what)


def error_for_link(response: ErrorResponse, what: str) -> Exception:
    """The exception for a link that is refused: most have expired."""
    error = error_for(response, what)
    error.add_note("feedline: this is a link with a query. If it is signed, it may have expired: request a new one")
    return error


def _unreachable_error(error: URLError, what: str) -> Exception:
    if isinstance(error.reason, ssl.SSLCertVerificationError):
        return StoreError(
            f"{what}: the certificate of the server cannot be verified "
            f'({error.reason.verify_message}); give its own as options={{"root_certificate": ...}}'
        )
    return TransientError("no answer in time" if isinstance(error.reason, TimeoutError) else "no connection")


def _chunks(answer: _Answer, nbytes: int) -> Iterator[bytes]:
    for _ in numbers():
        chunk = answer.body.read(nbytes)
        if not chunk:
            return
        yield chunk


def check_is_file(key: str, attributes: Mapping[str, Any], what: str) -> None:
    """Raise StoreError if headers show that the answer is not the file.

    It may be a login page with status 200. It may also be compressed by a server in between: its ranges are then not
    ranges of the file.
    """
    name, _ = split_link(key)
    extension = name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""
    if extension and extension not in _PAGES and str(attributes.get("Content-Type", "")).startswith("text/html"):
        raise StoreError(
            f"{what}: the server answered with a web page (text/html), not with the file. Check the address, and "
            "whether it needs a login"
        )
    encoding = str(attributes.get("Content-Encoding", "") or "identity").lower()
    if encoding not in ("identity", "aws-chunked") and extension not in ("gz", "tgz", "zst", "br", "svgz"):
        raise StoreError(
            f"{what}: the server sends the file compressed (Content-Encoding: {encoding[:20]}), although the request "
            "did not allow it. Turn the compression off for these files, or store them without that header"
        )


def _version(headers: HTTPMessage, nbytes: int) -> str:
    etag = headers.get("ETag", "").replace('"', "")
    if etag:
        return etag
    with suppress(TypeError, ValueError):
        modified = parsedate_to_datetime(headers.get("Last-Modified", ""))
        return f"{modified.isoformat()} {nbytes}"
    return unversioned(nbytes)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to web servers, but never from https to http."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if not newurl.startswith(("https://", "http://" if req.type == "http" else "https://")):
            raise HTTPError(req.full_url, code, "insecure", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(root: str, options: StoreOptions) -> OpenerDirector:
    context = ssl.create_default_context()
    if str(options.get("allow_invalid_certificates", False)).lower() == "true":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if (certificate := options.get("root_certificate")) is not None:
        try:
            context.load_verify_locations(cadata=certificate if isinstance(certificate, str) else certificate.decode())
        except ssl.SSLError:
            raise ArgumentError(f"{root}: the option 'root_certificate' must be certificates in PEM format") from None
    proxy = options.get("proxy_url")
    return build_opener(
        _Redirects(), HTTPSHandler(context=context), ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
    )
