"""Single requests to object stores, through obstore.

The module also loads obstore's extension module in each process, and has the settings that differ for Google Cloud
Storage.
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
from feedline.errors import (
    ArgumentError,
    InvalidNameError,
    MissingExtraError,
    NoRangesError,
    StoreError,
    TransientError,
)
from feedline.stores.base import ByteRange, ObjectInfo, unversioned
from feedline.stores.obstore_errors import is_obstore_error, no_ranges, translate_error
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange, check_complete

_NAME = "obstore._obstore"


class _ObstoreForks:
    """Records whether this process was forked after obstore was loaded."""

    def __init__(self) -> None:
        self.loaded_before_fork = False

    def update(self) -> None:
        self.loaded_before_fork = self.loaded_before_fork or _NAME in sys.modules


_fork_record = _ObstoreForks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork_record.update)


def _library() -> Any:
    """The extension module: its functions and, in `_store`, its store classes.

    The threads of its runtime exist once per process and do not survive a fork. In the child, every call would wait
    forever, even with new stores, because the runtime belongs to the loaded library. A forked child therefore loads the
    library a second time, from a copy, which the dynamic linker regards as another library: it costs about 10 ms, once.
    """
    module = load(_NAME, "stores", "object storage")
    return _second_copy(module.__file__) if _fork_record.loaded_before_fork else module


def _second_copy(file: str) -> Any:
    """Load obstore's library again, with threads and connections of its own."""
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
    """The settings for Google: `endpoint` or emulator become `base_url`."""
    own = {_name(option): value for option, value in config.items()}
    server = own.pop("endpoint", None) or own.get("base_url") or os.environ.get("GOOGLE_BASE_URL")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and not server:  # HOST:PORT or an address, and no credentials, as in Google's own libraries
        server = emulator if "://" in emulator else f"http://{emulator}"
        own = {"skip_signature": True, **own}
    return {**own, "base_url": str(server).rstrip("/")} if server else own


def _name(option: str) -> str:
    return option.lower().removeprefix("google_")


Config = dict[str, Any]


def _unchanged_config(root: str, config: Config) -> tuple[str, Config]:
    return root.partition("://")[2], config


def _google(root: str, config: Config) -> tuple[str, Config]:
    return root.partition("://")[2], settings(config)


def _azure(root: str, config: Config) -> tuple[str, Config]:
    """Split `container@account.dfs...` of `abfss://` into container and account."""
    container, _, account = root.partition("://")[2].partition("@")
    return container, config | ({"account_name": account.partition(".")[0]} if account else {})


def _web(root: str, config: Config) -> tuple[str, Config]:
    if config:
        raise ArgumentError(f"{root}: a web server has no option {next(iter(config))!r}; remove it")
    return root, config


@dataclass(frozen=True, slots=True)
class ObstoreKind:
    """One of obstore's kinds of stores."""

    name: str
    """The class in obstore."""
    arguments: Callable[[str, Config], tuple[str, Config]] = _unchanged_config
    """Returns the bucket and the configuration for an address and the options of the store, without options of the
    client.
    """
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


_NEVER = timedelta(days=365)
"""The limit of a whole request: a slow connection does not fail as long as bytes arrive."""


_LISTED_AT_ONCE = 100
"""Objects per page of a listing: fewer than a server sends, so that a failure loses few of them."""


_UNREADABLE = re.compile(r'failed to parse "(.*)" as (\w+)', re.DOTALL)


_WANTED_KINDS = {"Duration": 'a time such as "30s"', "boolean": "True or False"}


_PEM = "certificates in PEM format"


_WANTED = {"proxy_url": "the address of a proxy", "proxy_ca_certificate": _PEM, "root_certificate": _PEM}


class RangeAnswer(NamedTuple):
    """A complete, checked range; `size` is the size of the whole object."""

    data: memoryview
    version: str
    size: int


class Client:
    """Single requests, one attempt each. Safe to use from several threads."""

    _checks_headers = False
    """True if headers must be checked: obstore makes a dictionary of them for each answer."""

    def __init__(self, kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> None:
        self._library = library()
        self._store = self._call(root, lambda: open_checked(self._library, kind, root, options, idle_timeout_s))

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object; its path is the key."""
        meta = self._request(what, lambda: self._library.head(self._store, key))
        return ObjectInfo(key, meta["size"], _version(meta))

    def pages(self, prefix: str, offset: str | None) -> Iterator[Any]:
        """Iterate over pages of object metadata below a prefix.

        Gives only objects after `offset`.
        """
        count(requests=1)
        pages: Iterator[Any] = self._library.list(
            self._store, prefix or None, offset=offset, chunk_size=_LISTED_AT_ONCE
        )
        return pages

    def page(self, pages: Iterator[Any], what: str) -> list[ObjectInfo] | None:
        """The next of these pages; None after the last one."""
        metas = self._call(what, lambda: next(pages, None))
        return None if metas is None else [ObjectInfo(meta["path"], meta["size"], _version(meta)) for meta in metas]

    def odd_pages(self, prefix: str, offset: str | None, what: str) -> Iterator[Any]:
        """Pages of objects with any names."""
        raise NotImplementedError  # web servers do not list

    def folder(self, prefix: str, what: str) -> tuple[list[ObjectInfo], set[str]]:
        """List the objects and folders directly in a folder, in any order.

        The prefix is "" or ends with a `/`.
        """
        listing = self._request(what, lambda: self._library.list_with_delimiter(self._store, prefix or None))
        infos = [ObjectInfo(meta["path"], meta["size"], _version(meta)) for meta in listing["objects"]]
        return infos, set(listing["common_prefixes"])

    def get(self, key: str, part: PartialRange, what: str) -> None:
        """Fetch the rest of a range into `part`.

        Stops at the end of the object. TransientError if the connection breaks; `part` keeps the received bytes. A
        server without ranges gets a request for the whole object, if the range may be all of it.
        """
        span = part.remaining

        def get() -> None:
            result = self._library.get(self._store, key, options={"range": tuple(span)})
            meta, (start, stop) = result.meta, result.range
            if (start, stop) != (span.start, min(span.stop, meta["size"])):
                raise StoreError(f"{what}: the server answered with bytes [{start}, {stop}) instead")
            if self._checks_headers:
                self._check_is_file(key, result.attributes, what)
            part.accept(_version(meta), meta["size"], ByteRange(start, stop))
            size = part.part_nbytes
            for data in [result.bytes()] if size is None else result.stream(min_chunk_size=size):
                part.add(memoryview(data))
            part.check_complete()

        try:
            self._request(what, get)
        except NoRangesError:
            if span.start:
                raise
            answer = self.whole(key, what, span.stop)
            part.accept(answer.version, answer.size, ByteRange(0, answer.size))
            part.add(answer.data)

    def whole(self, key: str, what: str, most: int | None = None) -> RangeAnswer:
        """Read an object without a range request.

        NoRangesError if it has more than `most` bytes.
        """

        def get() -> tuple[Any, memoryview]:
            result = self._library.get(self._store, key)
            if most is not None and result.meta["size"] > most:
                raise NoRangesError(no_ranges(what))
            self._check_is_file(key, result.attributes, what)
            return result.meta, memoryview(result.bytes())

        meta, data = self._request(what, get)
        check_complete(data.nbytes, meta["size"])
        return RangeAnswer(data, _version(meta), meta["size"])

    def _check_is_file(self, key: str, attributes: Mapping[str, Any], what: str) -> None:
        """Raise StoreError if a web server sends something else."""

    def _request(self, what: str, call: Any) -> Any:
        count(requests=1)
        return self._call(what, call)

    def _call(self, what: str, call: Any) -> Any:
        try:
            return call()
        except TransientError as error:
            problem: Exception = error
        except Exception as error:
            if not is_obstore_error(error, self._library):
                raise
            problem = translate_error(error, what)
        # Raised outside the handler: the context would be obstore's exception, whose text may contain keys and
        # signatures.
        if isinstance(problem, TransientError):
            count(throttled=problem.throttled)
        raise problem


class PagedListing:
    """A listing by pages that resumes after a failed page.

    The prefix is "" or ends with a `/`.
    """

    def __init__(self, client: Callable[[], Client], prefix: str, what: str) -> None:
        self._client, self._prefix, self._what = client, prefix, what
        self._pages: Iterator[Any] | None = None
        self._infos: dict[str, ObjectInfo] = {}
        self._last: str | None = None
        self._in_order = True

    def grow(self) -> bool:
        """Request one more page; False after the last."""
        client = self._client()
        if self._pages is None:  # a listing without an order must start again
            self._pages = client.pages(self._prefix, self._last if self._in_order else None)
        try:
            page = client.page(self._pages, self._what)
        except TransientError:
            self._pages = None
            raise
        except InvalidNameError as error:
            self._pages, page = self._odd_pages(client, error), []
        for info in page or ():
            self._in_order = self._in_order and (self._last is None or self._last <= info.path)
            self._last = info.path
            self._infos[info.path] = info
        return page is not None

    def _odd_pages(self, client: Client, error: InvalidNameError) -> Iterator[Any]:
        try:
            return client.odd_pages(self._prefix, self._last, self._what)
        except StoreError as problem:
            error.add_note(f"feedline: {problem}")
        raise error

    def infos(self) -> list[ObjectInfo]:
        """The received objects, sorted by path."""
        return sorted(self._infos.values(), key=lambda info: info.path)


def open_checked(library: Any, kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> Any:
    """Call `_open`; the error names the option that obstore cannot read."""
    try:
        return _open(library, kind, root, options, idle_timeout_s)
    except ArgumentError:
        raise
    except (library.exceptions.BaseError, ValueError) as error:
        unreadable = _UNREADABLE.search(str(error).partition("\n\nDebug source:")[0])
        if unreadable is not None:
            names = [name for name, value in options.items() if str(value) == unreadable[1]]
            wanted = _WANTED_KINDS.get(unreadable[2], f"what can be read as {unreadable[2]}")
        elif (names := [name for name in options if name in _WANTED]) and "Config error" not in str(error):
            wanted = " and ".join(_WANTED[name] for name in names)
        else:
            raise
        option_names = " and ".join(map(repr, names)) or "that an environment variable sets"
        problem = ArgumentError(f"{root}: the option {option_names} must be {wanted}")
    raise problem  # without obstore's exception, whose text contains the value


def _open(library: Any, kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> Any:
    client = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    place, config = kind.arguments(root, {name: value for name, value in options.items() if name not in client})
    server = config.get(kind.server_option)
    if server is not None and _ADDRESS.fullmatch(str(server)) is None:
        raise ArgumentError(f"{root}: an endpoint is the address of a server, http://HOST or https://HOST")
    client.setdefault("allow_http", _is_plain_http(root, server))
    return getattr(library._store, kind.name)(
        place,
        **({"config": config} if config else {}),
        client_options={"read_timeout": timedelta(seconds=idle_timeout_s), **client, "timeout": _NEVER},
        retry_config={"max_retries": 0},  # only the policy of all stores counts
    )


def _is_plain_http(root: str, server: str | None) -> bool:
    """True if a configured server uses http without TLS.

    obstore refuses such a server without `allow_http`.
    """
    servers = [root, server, *map(os.environ.get, _ENDPOINTS)]
    return any(server.startswith("http://") for server in servers if server)


def _version(meta: Any) -> str:
    etag: str | None = meta["e_tag"]
    if etag:
        return etag.replace('"', "")  # Azure quotes it in some answers only
    nbytes, modified = meta["size"], meta["last_modified"]
    # Without a time from the server, obstore returns the first second of 1970.
    return f"{modified.isoformat()} {nbytes}" if modified.timestamp() else unversioned(nbytes)
