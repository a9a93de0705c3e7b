"""Paths in addresses of web servers, and links with a query.

The query may be a signature that grants access. Such a path contains the query after a marker. `unsigned(path)` is the
part to show, store or compare.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import quote, unquote

_LINK = "\x1f"
"""Separator of path and query of a link: a character that no written address contains."""


_ESCAPE = "\x1e"
"""Stands for the percent sign of a character that stays escaped in a path."""


_KEPT = re.compile(r"%(?=2[FfBb]|1[EeFf])")
"""Escapes of `/` and `+`, which servers tell from the characters themselves, and of the two separators above."""


_ESCAPES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


_SIGNING = re.compile(
    r"(?i)x-(?:amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|hdnea|.*token.*"
    r"|sig|se|st|sp|sv|sr|si|sip|spr|ss|srt|sks|skt|ske|skv|skoid|sktid|sdd|saoid|suoid|scid"
)
"""Parameters of signatures, which differ each time the same link is signed."""


def decoded(written: str) -> str:
    """The path that is written in an address.

    `%20` becomes a space; `%2F` and `%2B` stay apart from `/` and `+`. Escapes that are not UTF-8 are kept.
    """
    return _ESCAPES.sub(_decoded_run, _KEPT.sub(_ESCAPE, written))


def _decoded_run(run: re.Match[str]) -> str:
    try:
        return unquote(run[0], errors="strict")
    except UnicodeDecodeError:
        return run[0].replace("%", _ESCAPE)


def encoded(path: str, safe: str) -> str:
    """The inverse of `decoded`; the characters of `safe` are not escaped."""
    return quote(path, safe=safe + _ESCAPE).replace(_ESCAPE, "%")


def shown(path: str) -> str:
    """A path without a query, as messages write it."""
    return path.replace("%", "%25").replace("?", "%3F").replace(_ESCAPE, "%")


def keeps_escapes(path: str) -> bool:
    """True if a path has escapes that are sent as written."""
    return _ESCAPE in path


def as_link(name: str, query: str) -> str:
    """The path of an object with this query, which may be empty."""
    return f"{name}{_LINK}{query}" if query else name


def split_link(path: str) -> tuple[str, str]:
    """The name and the query of a path, "" without one."""
    name, _, query = path.partition(_LINK)
    return name, query


def unsigned(path: str) -> str:
    """The path of an object as it is shown and stored.

    It is the same for each signature of a link. Other parameters distinguish objects but may also be secrets, so
    digests replace their values.
    """
    name, query = split_link(path)
    given = [each.partition("=") for each in query.split("&") if each]
    named = [f"{key}=~{_digest(value)}" for key, _, value in given if not _SIGNING.fullmatch(unquote(key))]
    return f"{name}{_LINK}{'&'.join(named)}" if query else name


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
