"""obstore's store for one address, in one process."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote

from feedline.errors import ArgumentError
from feedline.store_counts import count
from feedline.stores import google, plain
from feedline.stores.addresses import SCHEMES, scheme_of
from feedline.stores.failures import is_obstores, translated
from feedline.stores.library import library
from feedline.stores.options import Options
from feedline.stores.problems import StoreError, TransientError
from feedline.stores.protocol import ObjectInfo, Span

_CLIENT_OPTIONS = frozenset(
    (
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "root_certificate",
        "user_agent",
    )
)
_UNKNOWN_TO_PLAIN = frozenset({"allow_invalid_certificates", "proxy_ca_certificate", "proxy_url", "root_certificate"})
_ADDRESS = re.compile(r"https?://[^\s/]\S*")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_SIGNED_FOR = timedelta(minutes=5)


class Answer(NamedTuple):
    """A range of an object, checked: it is all there. `size` is that of the whole object."""

    data: memoryview
    version: str
    size: int


class Client:
    """Single requests, each one attempt. Safe to use from several threads."""

    def __init__(self, root: str, options: Options, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._library = library()
        self._store = self._call(root, lambda: _opened(self._library, root, options, timeout_s))
        signs = SCHEMES[scheme_of(root)] != "gs" or google.signs_alone(options)
        self._plain = signs and _UNKNOWN_TO_PLAIN.isdisjoint(options)

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object, under its key."""
        meta = self._request(what, lambda: self._library.head(self._store, key))
        return ObjectInfo(key, meta["size"], _version(meta))

    def list(self, prefix: str, what: str) -> list[ObjectInfo]:
        """All objects below a prefix that ends at a `/`, in any order."""
        metas = self._request(what, lambda: self._library.list(self._store, prefix or None).collect())
        return [ObjectInfo(meta["path"], meta["size"], _version(meta)) for meta in metas]

    def get(self, key: str, span: Span, what: str) -> Answer:
        """The span, or as much of it as the object has; TransientError for less."""

        def get() -> tuple[Any, tuple[int, int], memoryview]:
            result = self._library.get(self._store, key, options={"range": tuple(span)})
            return result.meta, result.range, memoryview(result.bytes())

        meta, (start, stop), data = self._request(what, get)
        if (start, stop) != (span.start, min(span.stop, meta["size"])):
            raise StoreError(f"{what}: the server answered with bytes [{start}, {stop}) instead")
        _refuse_truncated(data, stop - start)
        return Answer(data, _version(meta), meta["size"])

    def get_plainly(self, key: str, span: Span, what: str) -> Answer:
        """As `get`, but its TransientError tells for how long the server asks to be left alone."""
        address = self._address(key)
        told = None if address is None else self._request(what, lambda: plain.ask(address, span, self._timeout_s))
        if told is None:
            return self.get(key, span, what)
        data = memoryview(told.data)
        _refuse_truncated(data, min(span.stop, told.size) - span.start)
        return Answer(data, _unquoted(told.etag), told.size)

    def _address(self, key: str) -> str | None:
        """Where anybody could read the object for a few minutes; None where only obstore can."""
        if not self._plain:
            return None
        if scheme_of(self._root).startswith("http"):
            return f"{self._root}/{quote(key)}"
        try:
            address: str = self._library.sign(self._store, "GET", key, _SIGNED_FOR)
        except self._library.exceptions.BaseError:  # nothing to sign with, which is no failure
            return None
        return address

    def _request(self, what: str, call: Any) -> Any:
        count(requests=1)
        return self._call(what, call)

    def _call(self, what: str, call: Any) -> Any:
        try:
            return call()
        except TransientError as error:
            problem: Exception = error
        except Exception as error:
            if not is_obstores(error, self._library):
                raise
            problem = translated(error, what)
        # Raised out here, it does not carry obstore's exception, whose text may hold keys and signatures.
        if isinstance(problem, TransientError):
            count(throttled=problem.throttled)
        raise problem


def _opened(library: Any, root: str, options: Options, timeout_s: float) -> Any:
    scheme, host = scheme_of(root), root.partition("://")[2]
    client = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    config = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    kind = SCHEMES[scheme]
    if kind == "gs":
        config = google.settings(config)
    server = config.get("base_url" if kind == "gs" else "endpoint")
    if server is not None and _ADDRESS.fullmatch(str(server)) is None:
        raise ArgumentError(f"{root}: an endpoint is the address of a server, http://HOST or https://HOST")
    client.setdefault("allow_http", _is_plain_http(root, server))
    common = {
        "client_options": {**client, "timeout": timedelta(seconds=timeout_s)},
        "retry_config": {"max_retries": 0},  # there is one policy for all stores, and it counts
    }
    if kind.startswith("http"):
        if config:
            raise ArgumentError(f"{root}: a web server has no option {next(iter(config))!r}")
        return library._store.HTTPStore(root, **common)
    if kind == "az":
        host, _, account = host.partition("@")
        config |= {"account_name": account.partition(".")[0]} if account else {}
    stores = {"s3": library._store.S3Store, "gs": library._store.GCSStore, "az": library._store.AzureStore}
    return stores[kind](host, config=config, **common)


def _is_plain_http(root: str, server: str | None) -> bool:
    """Whether the user has named a server without TLS, which obstore wants to be told a second time."""
    servers = [root, server, *map(os.environ.get, _ENDPOINTS)]
    return any(server.startswith("http://") for server in servers if server)


def _version(meta: Any) -> str:
    etag: str | None = meta["e_tag"]
    return _unquoted(etag) if etag else f"{meta['last_modified'].isoformat()} {meta['size']}"


def _unquoted(etag: str) -> str:
    """Azure quotes it in one answer and not in another."""
    return etag.replace('"', "")


def _refuse_truncated(data: memoryview, expected: int) -> None:
    if data.nbytes != expected:
        count(truncated=1)
        raise TransientError(f"the answer was cut short, {data.nbytes} of {expected} bytes")
