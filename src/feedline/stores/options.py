"""Options of stores, kept out of messages and pickles where secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from feedline.errors import ArgumentError, NotPicklableError

_CREDENTIALS = re.compile("://[^/]*@|[?]")
"""Credentials in the address of a server."""


_PUBLIC_OPTIONS = frozenset(
    (
        "account_name",
        "allow_http",
        "allow_invalid_certificates",
        "anon",
        "base_url",
        "bucket",
        "connect_timeout",
        "container",
        "container_name",
        "endpoint",
        "endpoint_url",
        "host",
        "http1_only",
        "http2_only",
        "port",
        "pool_idle_timeout",
        "proxy_excludes",
        "read_timeout",
        "region",
        "repo_type",
        "request_payer",
        "revision",
        "skip_signature",
        "user_agent",
        "virtual_hosted_style_request",
    )
)
"""Options whose values are not secret. All others are treated as secrets."""


@dataclass(frozen=True, slots=True)
class FromEnv:
    """An environment variable, read by each process that opens the store.

    `FromEnv("STORAGE_KEY")` stands for its value among the options of a store.
    """

    variable: str

    def value(self) -> str:
        """The current value in this process."""
        try:
            return os.environ[self.variable]
        except KeyError:
            raise ArgumentError(
                f"the environment variable {self.variable}, which an option of a store refers to, is not set; set it"
            ) from None


class StoreOptions(Mapping[str, Any]):
    """The options of one store.

    Secrets are neither shown nor pickled; the names of environment variables are.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._values = dict(options or {})

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value.value() if isinstance(value, FromEnv) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _is_secret(self, name: str) -> bool:
        value = self._values[name]
        if isinstance(value, FromEnv):
            return False
        return name.lower() not in _PUBLIC_OPTIONS or (
            isinstance(value, str) and _CREDENTIALS.search(value) is not None
        )

    def __repr__(self) -> str:
        shown = (f"{name}=***" if self._is_secret(name) else f"{name}={self._values[name]!r}" for name in self)
        return f"Options({', '.join(shown)})"

    def raw(self) -> Mapping[str, Any]:
        """The values as given: environment variables are not resolved."""
        return self._values

    def __reduce__(self) -> tuple[type[StoreOptions], tuple[dict[str, Any]]]:
        for name in self:
            if self._is_secret(name):
                raise NotPicklableError(
                    f"the option {name!r} of a store may be a secret, which is not written into a pickle. Set the "
                    f"store's own environment variable instead, or options={{{name!r}: stores.FromEnv('VARIABLE')}}"
                )
        return StoreOptions, (self._values,)


def check_option_types(options: StoreOptions, root: str) -> None:
    """Raise ArgumentError for values whose types obstore would ignore.

    Numbers, for example.
    """
    for name, value in options.raw().items():
        if not isinstance(value, (str, bytes, bool, timedelta, os.PathLike, FromEnv)):
            raise ArgumentError(
                f'{root}: the option {name!r} must be text, or True or False; a time is written "30s". It is of type '
                f"{type(value).__name__}"
            )
