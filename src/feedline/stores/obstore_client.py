"""obstore's store for one address, in one process.

obstore, loaded such that it works in every process.

Google Cloud Storage, where obstore's names and needs differ from those of the other stores.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from feedline.core.caches import PerProcess
from feedline.core.optional import load
from feedline.core.store_metrics import count
from feedline.errors import ArgumentError, MissingExtraError, NoRangesError, StoreError, TransientError
from feedline.stores.base import ByteRange, ObjectInfo, unversioned
from feedline.stores.obstore_errors import is_obstores, no_ranges, translated
from feedline.stores.options import StoreOptions

_NAME = "obstore._obstore"


class _Inheritance:
    """Whether this process was forked from one that had loaded obstore."""

    def __init__(self) -> None:
        self.loaded_before_fork = False

    def look(self) -> None:
        self.loaded_before_fork = self.loaded_before_fork or _NAME in sys.modules


_inheritance = _Inheritance()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inheritance.look)


def _library() -> Any:
    """The extension module itself: its functions and, in `_store`, its store classes.

    The threads of its runtime live once per process and do not survive a fork: in the child every call would wait for
    ever, through new stores too, because the runtime belongs to the loaded library. A forked child therefore loads the
    library a second time, from a copy, which the dynamic linker takes for another one: it costs about 10 ms, once.
    """
    module = load(_NAME, "stores", "object storage")
    return _second_copy(module.__file__) if _inheritance.loaded_before_fork else module


def _second_copy(file: str) -> Any:
    if not hasattr(os, "memfd_create"):
        raise MissingExtraError(
            "obstore cannot be used in a process that was forked after its parent had used it; "
            'start workers with multiprocessing_context="spawn"'
        )
    fd = os.memfd_create("obstore", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as copy:
            copy.write(Path(file).read_bytes())
        loader = ExtensionFileLoader(_NAME, f"/proc/self/fd/{fd}")
        spec = importlib.util.spec_from_loader(_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        os.close(fd)


library = PerProcess(_library)
"""`library()` is obstore's extension module for this process."""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What obstore is opened with: the server by its name `base_url`, be it an `endpoint` or Google's emulator."""
    own = {_name(option): value for option, value in config.items()}
    server = own.pop("endpoint", None) or own.get("base_url") or os.environ.get("GOOGLE_BASE_URL")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and not server:  # HOST:PORT or an address, and no credentials: as Google's own libraries do
        server = emulator if "://" in emulator else f"http://{emulator}"
        own = {"skip_signature": True, **own}
    return {**own, "base_url": str(server).rstrip("/")} if server else own


def _name(option: str) -> str:
    return option.lower().removeprefix("google_")


Config = dict[str, Any]


def _as_given(root: str, config: Config) -> tuple[str, Config]:
    return root.partition("://")[2], config


def _google(root: str, config: Config) -> tuple[str, Config]:
    return root.partition("://")[2], settings(config)


def _azure(root: str, config: Config) -> tuple[str, Config]:
    """`abfss://container@account.dfs...` names the account in the address."""
    container, _, account = root.partition("://")[2].partition("@")
    return container, config | ({"account_name": account.partition(".")[0]} if account else {})


def _web(root: str, config: Config) -> tuple[str, Config]:
    if config:
        raise ArgumentError(f"{root}: a web server has no option {next(iter(config))!r}")
    return root, config


@dataclass(frozen=True, slots=True)
class ObstoreKind:
    """One of obstore's kinds of stores."""

    name: str
    """Its class in obstore."""
    arguments: Callable[[str, Config], tuple[str, Config]] = _as_given
    """The bucket and the configuration for an address and the options that are not the client's."""
    server_option: str = "endpoint"
    """The name of the option with the address of the server."""


S3 = ObstoreKind("S3Store")
GOOGLE = ObstoreKind("GCSStore", _google, "base_url")
AZURE = ObstoreKind("AzureStore", _azure)
WEB = ObstoreKind("HTTPStore", _web)


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


_ADDRESS = re.compile(r"https?://[^\s/]\S*")


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")


_LISTED_AT_ONCE = 100
"""Objects of a listing that come to us together: fewer than a server sends, so that hardly any are lost if it fails."""


_UNREADABLE = re.compile(r'failed to parse "(.*)" as (\w+)', re.DOTALL)


_KINDS = {"Duration": 'a time such as "30s"', "boolean": "True or False"}


_PEM = "certificates as PEM"


_WANTED = {"proxy_url": "the address of a proxy", "proxy_ca_certificate": _PEM, "root_certificate": _PEM}


class RangeAnswer(NamedTuple):
    """A range of an object, checked: it is all there. `size` is that of the whole object."""

    data: memoryview
    version: str
    size: int


class Client:
    """Single requests, each one attempt. Safe to use from several threads."""

    def __init__(self, kind: ObstoreKind, root: str, options: StoreOptions, timeout_s: float) -> None:
        self._library = library()
        self._store = self._call(root, lambda: _opened_or_told(self._library, kind, root, options, timeout_s))

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object, under its key."""
        meta = self._request(what, lambda: self._library.head(self._store, key))
        return ObjectInfo(key, meta["size"], _version(meta))

    def pages(self, prefix: str, offset: str | None) -> Iterator[Any]:
        """What obstore tells of the objects below a prefix, those behind `offset` only: lists of them."""
        count(requests=1)
        pages: Iterator[Any] = self._library.list(
            self._store, prefix or None, offset=offset, chunk_size=_LISTED_AT_ONCE
        )
        return pages

    def page(self, pages: Iterator[Any], what: str) -> list[ObjectInfo] | None:
        """The next of these pages; None behind the last."""
        metas = self._call(what, lambda: next(pages, None))
        return None if metas is None else [ObjectInfo(meta["path"], meta["size"], _version(meta)) for meta in metas]

    def folder(self, prefix: str, what: str) -> list[ObjectInfo]:
        """The objects right in a folder, "" or one that ends with a `/`, in any order."""
        found = self._request(what, lambda: self._library.list_with_delimiter(self._store, prefix or None))
        return [ObjectInfo(meta["path"], meta["size"], _version(meta)) for meta in found["objects"]]

    def get(self, key: str, span: ByteRange, what: str) -> RangeAnswer:
        """The span, or as much of it as the object has; TransientError for less.

        A server without ranges is asked for the whole object, if the span may be all of it.
        """

        def get() -> tuple[Any, tuple[int, int], memoryview]:
            result = self._library.get(self._store, key, options={"range": tuple(span)})
            return result.meta, result.range, memoryview(result.bytes())

        try:
            meta, (start, stop), data = self._request(what, get)
        except NoRangesError:
            if span.start:
                raise
            return self.whole(key, what, span.stop)
        if (start, stop) != (span.start, min(span.stop, meta["size"])):
            raise StoreError(f"{what}: the server answered with bytes [{start}, {stop}) instead")
        _refuse_truncated(data, stop - start)
        return RangeAnswer(data, _version(meta), meta["size"])

    def whole(self, key: str, what: str, most: int | None = None) -> RangeAnswer:
        """An object without asking for a range; NoRangesError if it has more than so many bytes."""

        def get() -> tuple[Any, memoryview]:
            result = self._library.get(self._store, key)
            if most is not None and result.meta["size"] > most:
                raise NoRangesError(no_ranges(what))
            return result.meta, memoryview(result.bytes())

        meta, data = self._request(what, get)
        _refuse_truncated(data, meta["size"])
        return RangeAnswer(data, _version(meta), meta["size"])

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


class PagedListing:
    """The objects below a prefix that ends at a `/`, page by page: what came before a failure need not come again."""

    def __init__(self, client: Callable[[], Client], prefix: str, what: str) -> None:
        self._client, self._prefix, self._what = client, prefix, what
        self._pages: Iterator[Any] | None = None
        self._found: dict[str, ObjectInfo] = {}
        self._last: str | None = None
        self._in_order = True

    def grow(self) -> bool:
        """Ask for one more page; whether there was one."""
        client = self._client()
        if self._pages is None:  # some stores list in no order, and must begin anew
            self._pages = client.pages(self._prefix, self._last if self._in_order else None)
        try:
            page = client.page(self._pages, self._what)
        except TransientError:
            self._pages = None
            raise
        for info in page or ():
            self._in_order = self._in_order and (self._last is None or self._last <= info.path)
            self._last = info.path
            self._found[info.path] = info
        return page is not None

    def infos(self) -> list[ObjectInfo]:
        """What came so far, in the order of the paths."""
        return sorted(self._found.values(), key=lambda info: info.path)


def _opened_or_told(library: Any, kind: ObstoreKind, root: str, options: StoreOptions, timeout_s: float) -> Any:
    """As `_opened`; ArgumentError names the option that obstore cannot read."""
    try:
        return _opened(library, kind, root, options, timeout_s)
    except ArgumentError:
        raise
    except (library.exceptions.BaseError, ValueError) as error:
        unreadable = _UNREADABLE.search(str(error).partition("\n\nDebug source:")[0])
        if unreadable is not None:
            names = [name for name, value in options.items() if str(value) == unreadable[1]]
            wanted = _KINDS.get(unreadable[2], f"what can be read as {unreadable[2]}")
        elif (names := [name for name in options if name in _WANTED]) and "Config error" not in str(error):
            wanted = " and ".join(_WANTED[name] for name in names)
        else:
            raise
        told = " and ".join(map(repr, names)) or "that an environment variable sets"
        problem = ArgumentError(f"{root}: the option {told} must be {wanted}")
    raise problem  # without obstore's exception, whose text holds the value


def _opened(library: Any, kind: ObstoreKind, root: str, options: StoreOptions, timeout_s: float) -> Any:
    client = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    place, config = kind.arguments(root, {name: value for name, value in options.items() if name not in client})
    server = config.get(kind.server_option)
    if server is not None and _ADDRESS.fullmatch(str(server)) is None:
        raise ArgumentError(f"{root}: an endpoint is the address of a server, http://HOST or https://HOST")
    client.setdefault("allow_http", _is_plain_http(root, server))
    return getattr(library._store, kind.name)(
        place,
        **({"config": config} if config else {}),
        client_options={**client, "timeout": timedelta(seconds=timeout_s)},
        retry_config={"max_retries": 0},  # there is one policy for all stores, and it counts
    )


def _is_plain_http(root: str, server: str | None) -> bool:
    """Whether the user has named a server without TLS, which obstore wants to be told a second time."""
    servers = [root, server, *map(os.environ.get, _ENDPOINTS)]
    return any(server.startswith("http://") for server in servers if server)


def _version(meta: Any) -> str:
    etag: str | None = meta["e_tag"]
    if etag:
        return etag.replace('"', "")  # Azure quotes it in one answer and not in another
    nbytes, modified = meta["size"], meta["last_modified"]
    # Where a server tells no time, obstore tells the first second of 1970.
    return f"{modified.isoformat()} {nbytes}" if modified.timestamp() else unversioned(nbytes)


def _refuse_truncated(data: memoryview, expected: int) -> None:
    if data.nbytes != expected:
        count(truncated=1)
        raise TransientError(f"the answer was cut short, {data.nbytes} of {expected} bytes")
