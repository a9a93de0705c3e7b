"""One way to open every store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from feedline.errors import ArgumentError
from feedline.stores import patterns
from feedline.stores.addresses import SCHEMES, Address, absolute, refuse_secrets, scheme_of, split
from feedline.stores.cache import Cache, CachedStore
from feedline.stores.coalescing import Requests
from feedline.stores.foreign import ForeignStore
from feedline.stores.local import LocalStore
from feedline.stores.options import Options, refuse_untyped
from feedline.stores.protocol import Store
from feedline.stores.remote import RemoteStore
from feedline.stores.retry import Retry

Policy = TypeVar("Policy", Retry, Requests)


def open_store(
    address: Address,
    *,
    options: Mapping[str, Any] | None = None,
    retry: Retry | None = None,
    requests: Requests | None = None,
    cache: Cache | str | Path | None = None,
) -> Store:
    """The store at an address: a folder, a bucket or server, or a prefix of one; paths are relative to it.

    `s3://`, `gs://`, `az://`, `http://` and `https://` are read by obstore, every other scheme by fsspec; neither is
    asked for anything yet. Credentials come from the environment, as each cloud's own tools read them, or from
    `options`, the names of which are obstore's (or, for fsspec's schemes, the file system's). There `retry` and
    `requests` may stand, too, which is how a dataset, that opens its stores itself, is given them. With `cache`, what
    is read is kept in a folder of this machine.
    """
    given = _named(options)
    retry = _policy("retry", Retry, retry, given)
    requests = _policy("requests", Requests, requests, given)
    store = _opened(address, Options(given), retry, requests)
    if cache is None:
        return store
    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(cache))


def _named(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"options= takes a dictionary, not {type(options).__name__}")
    return dict(options or {})


def _policy(name: str, kind: type[Policy], given: Policy | None, options: dict[str, Any]) -> Policy:
    """How a store is asked: given by itself, or taken out of the options."""
    if given is not None and name in options:
        raise ArgumentError(f"{name} is given twice: by itself, and in options={{...}}")
    policy = options.pop(name, given)
    if policy is not None and not isinstance(policy, kind):
        raise ArgumentError(f"{name} takes a stores.{kind.__name__}(...), not {type(policy).__name__}")
    return kind() if policy is None else policy


def _opened(address: Address, options: Options, retry: Retry, requests: Requests) -> Store:
    scheme = scheme_of(address)
    refuse_secrets(address)
    if scheme == "file":
        if options:
            raise ArgumentError(f"{address} is a folder of this machine, which takes no options")
        return LocalStore(absolute(address))
    if scheme in SCHEMES:
        root, prefix = split(address)
        refuse_untyped(options, root)
        return RemoteStore(root, prefix, options, retry, requests)
    return ForeignStore(absolute(address), options, retry, requests)


def expand(addresses: Address | Sequence[Address], *, options: Mapping[str, Any] | None = None) -> list[str]:
    """The addresses that patterns with braces and globs stand for, in the order given; those of one glob are sorted.

    `s3://bucket/{train,val}-{000..127}.tar` is expanded without a request; `*`, `**`, `?` and `[...]` take one listing
    each. ObjectNotFoundError names a glob that matches nothing.
    """
    return patterns.expand(addresses, lambda root: open_store(root, options=options))
