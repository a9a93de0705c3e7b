"""obstore's exceptions, translated into feedline's with a remedy.

They are parsed for a status, a code and a kind, and never quoted: an answer of a server may contain the access key, an
address may contain a signature, and users may pass a key instead of a path.
"""

from __future__ import annotations

import re
from typing import Any

from feedline.errors import (
    AccessDeniedError,
    ArgumentError,
    FeedlineError,
    InvalidNameError,
    NoLengthError,
    NoRangesError,
    RangeError,
    StoreError,
    TransientError,
)
from feedline.stores.statuses import ErrorResponse, error_for, is_transient, region_error
from feedline.stores.urls import scheme_row

_METADATA = re.compile(r"http://169\.254\.169\.254/|/computeMetadata/v1/instance/service-accounts/")
"""Metadata servers with credentials for a cloud's own machines. obstore queries them if it has no other credentials."""


_KEYLESS = "contain no readable RSA private key. Create a new JSON file of the key at Google"


_UNREADABLE = {
    "Unable to open service account file": "cannot be opened. Check the path",
    "Unable to decode service account file": (
        "cannot be read. They must be the JSON file of a service account's key or what `gcloud auth "
        'application-default login` writes; for other credentials pass a token, options={"bearer_token": ...}'
    ),
    "Error reading pem file": _KEYLESS,
    "No RSA key": _KEYLESS,
    "Invalid RSA key": _KEYLESS,
    "One of service account path or service account key": "name a file and also contain a key. Remove one of them",
}


_REASON = re.compile(f"error: (?:GCP credential error: )?({'|'.join(_UNREADABLE)})")
"""obstore's errors about Google's credentials, before any request."""


def access_denied_error(text: str, what: str, status: int | None) -> AccessDeniedError | None:
    """The exception for a problem with credentials; None for other problems.

    `status` is the status of the answer, if there was one. The answer may come from another server than the store.
    """
    variables = scheme_row(what).credentials
    if variables and _METADATA.search(text) is not None:
        return AccessDeniedError(
            f"{what}: no credentials were found. Set them in the environment ({variables}), or read a public bucket "
            'with options={"skip_signature": True}'
        )
    if status is not None and "error: Error performing token request" in text:
        return AccessDeniedError(
            f"{what}: the server issues no token for these credentials (status {status}): they are wrong, have "
            "expired or were withdrawn. Renew them; Google's with `gcloud auth application-default login`"
        )
    reason = _REASON.search(text)
    if status is None and reason is not None:
        return AccessDeniedError(
            f"{what}: Google's credentials (GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, "
            f"GOOGLE_SERVICE_ACCOUNT_KEY, options of these names, or else gcloud's own file) {_UNREADABLE[reason[1]]}"
        )
    return None


_STATUS = re.compile(r"non-2xx status code: (\d{3})")


_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")


_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")


_SETTING = re.compile(r"\w+ must be specified|Configuration key: '\w+' is not valid for store '\w+'")


_INVALID = re.compile(r'object with invalid path: [^"]*"([^"]*)"')


_KIND = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode)\b")


_REDIRECT = re.compile(r"\n\s+(?:inner|source): (BareRedirect|TooManyRedirects),")


_KINDS = {
    "Connect": "no connection",
    "Request": "the connection broke before an answer came",
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke within the answer",
    "Decode": "an answer that cannot be read",
}


def translate_error(error: Exception, what: str) -> Exception:
    """Translate an exception of obstore.

    The result is a TransientError, or a permanent error that names `what` and a remedy.
    """
    text = str(error)
    match = _STATUS.search(text)
    status = int(match[1]) if match else None
    response = ErrorResponse(status or 0, _first(_CODE, text), _first(_REGION, text))
    is_final = status is None or not is_transient(status, response.code)
    if is_final and (problem := access_denied_error(text, what, status)) is not None:
        return problem
    if status is not None:
        return error_for(response, what)
    if isinstance(error, FileNotFoundError):
        return error_for(ErrorResponse(404), what)
    if (redirect := _REDIRECT.search(text)) is not None:
        return _redirect_error(redirect[1], what)
    kind = _KIND.search(text)
    if kind is not None and "builder error" not in text:
        return TransientError(_KINDS[kind[1]])
    return _error_for_text(error, text, what)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _redirect_error(kind: str, what: str) -> StoreError:
    if kind == "TooManyRedirects":
        return StoreError(
            f"{what}: the server redirects this address in a circle; check the address, and whether it needs a login"
        )
    return region_error(what, "", "a redirect without an address")


def _body_error(text: str, what: str) -> Exception | None:
    """The exception for a wrong range or length; None for others."""
    if "StartTooLarge" in text:  # the server sent the end of the object instead of an error
        return error_for(ErrorResponse(416), what)
    if "Range request not supported" in text or "non-partial response" in text:
        if "GCS" in text:
            return RangeError(
                f"{what}: Google Cloud decompresses objects stored with Content-Encoding: gzip, and serves no ranges "
                "of them; store the object without that header"
            )
        return NoRangesError(no_ranges(what))
    if "UnexpectedRange" in text:
        return StoreError(f"{what}: the server answered with other bytes instead; its ranges cannot be used")
    if "MissingContentLength" in text or "ContentRange" in text:
        return NoLengthError(
            f"{what}: the server does not state the length of the object; copy the object to a server that does"
        )
    return None


def _error_for_text(error: Exception, text: str, what: str) -> Exception:
    if "builder error" in text:
        return ArgumentError(
            f'{what}: the address of the server cannot be used; plain http needs options={{"allow_http": True}}'
        )
    if (problem := _body_error(text, what)) is not None:
        return problem
    if (invalid := _INVALID.search(text)) is not None:
        return InvalidNameError(
            f"{what}: there is an object named {invalid[1]!r}, and the parts of a name may not be empty, . or .., nor "
            "contain line breaks. Rename or remove it, or use a prefix that excludes it"
        )
    if "Could not parse path" in text:
        return ArgumentError(f"{what}: not a path that an object store can have (empty parts, . and .. are refused)")
    if (setting := _SETTING.search(text)) is not None:
        return ArgumentError(f"{what}: {setting[0]}; see options={{...}} of open_store")
    return StoreError(f"{what}: {type(error).__name__} of obstore, which is neither a status nor a broken connection")


def no_ranges(what: str) -> str:
    """The message about a server that only returns whole objects."""
    return f"{what}: the server ignores ranges; copy the object to a server that supports them"


def is_obstore_error(error: Exception, library: Any) -> bool:
    """True if obstore raised this error about a store.

    Other errors are bugs in the calling code.
    """
    return not isinstance(error, FeedlineError) and isinstance(
        error, (library.exceptions.BaseError, FileNotFoundError, PermissionError, ValueError)
    )
