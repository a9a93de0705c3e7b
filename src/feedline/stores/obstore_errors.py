"""obstore's exceptions, told in our words.

They are read for a status, a code and a kind, and never quoted: an answer of a server may hold the access key, and an
address a signature.

Credentials that are missing, refused or not to be read, told with the remedy of their cloud.

Nothing of theirs is quoted, not even a path: where a path is expected, people put the key itself.
"""

from __future__ import annotations

import re
from typing import Any

from feedline.errors import (
    AccessDeniedError,
    ArgumentError,
    FeedlineError,
    NoRangesError,
    ObjectChangedError,
    ObjectNotFoundError,
    RangeError,
    StoreError,
    TransientError,
)
from feedline.stores.urls import scheme_row

_METADATA = re.compile(r"http://169\.254\.169\.254/|/computeMetadata/v1/instance/service-accounts/")
"""The servers that give a cloud's own machines their credentials, which obstore asks when it has no others."""


_KEYLESS = "hold no RSA private key that can be read. Have Google make a new JSON file of the key"


_UNREADABLE = {
    "Unable to open service account file": "cannot be opened. Check the path",
    "Unable to decode service account file": (
        "cannot be read. They must be the JSON file of a service account's key or what `gcloud auth "
        'application-default login` writes; of other credentials give the token, options={"bearer_token": ...}'
    ),
    "Error reading pem file": _KEYLESS,
    "No RSA key": _KEYLESS,
    "Invalid RSA key": _KEYLESS,
    "One of service account path or service account key": "name a file and hold a key, too. Leave out one of the two",
}


_REASON = re.compile(f"error: (?:GCP credential error: )?({'|'.join(_UNREADABLE)})")
"""What obstore says of Google's credentials before it asks anybody."""


def access_denied_error(text: str, what: str, status: int | None) -> AccessDeniedError | None:
    """The exception for what obstore says about credentials; None where it speaks of something else.

    `status` is that of the answer, if one came, which need not be the store's.
    """
    variables = scheme_row(what).credentials
    if variables and _METADATA.search(text) is not None:
        return AccessDeniedError(
            f"{what}: no credentials were found. Set them in the environment ({variables}), or read a public bucket "
            'with options={"skip_signature": True}'
        )
    if status is not None and "error: Error performing token request" in text:
        return AccessDeniedError(
            f"{what}: no token is given for these credentials (status {status}): they are wrong, have expired or were "
            "withdrawn. Renew them; Google's with `gcloud auth application-default login`"
        )
    reason = _REASON.search(text)
    if status is None and reason is not None:
        return AccessDeniedError(
            f"{what}: Google's credentials (GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, "
            f"GOOGLE_SERVICE_ACCOUNT_KEY, options of these names, or else gcloud's own file) {_UNREADABLE[reason[1]]}"
        )
    return None


_STATUS = re.compile(r"non-2xx status code: (\d{3})")


_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


_SETTING = re.compile(r"\w+ must be specified|Configuration key: '\w+' is not valid for store '\w+'")


_INVALID = re.compile(r'object with invalid path: [^"]*"([^"]*)"')


_KIND = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode)\b")


PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


THROTTLED = frozenset({429, 503})


_STALE = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"})


_PASSING_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "ServerBusy"})


_KINDS = {
    "Connect": "no connection",
    "Request": "the connection broke before an answer came",
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke within the answer",
    "Decode": "an answer that cannot be read",
}


_DENIED = {
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "InvalidAccessKeyId": "the access key is not known there",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "AuthenticationFailed": "the account key or the signature is wrong",
    "AuthorizationFailure": "the account key or the signature is wrong",
    "AccessDenied": "the credentials may not read it",
}


def translated(error: Exception, what: str) -> Exception:
    """The exception to raise in place of obstore's: TransientError, or one for good that names `what` and a remedy."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    if status not in PASSING and (problem := access_denied_error(text, what, status)) is not None:
        return problem
    if status is not None:
        code = _CODE.search(text)
        return of_status(status, code[1] if code else "", what)
    if isinstance(error, FileNotFoundError):
        return of_status(404, "", what)
    kind = _KIND.search(text)
    if kind is not None and "builder error" not in text:
        return TransientError(_KINDS[kind[1]])
    return _of_words(error, text, what)


def _of_words(error: Exception, text: str, what: str) -> Exception:
    if "builder error" in text:
        return ArgumentError(
            f'{what}: the address of the server cannot be used; plain http needs options={{"allow_http": True}}'
        )
    if "Range request not supported" in text or "non-partial response" in text:
        if "GCS" in text:
            return RangeError(
                f"{what}: Google Cloud unpacks what is stored with Content-Encoding: gzip, and gives no ranges of it; "
                "store it without that header"
            )
        return NoRangesError(no_ranges(what))
    if (invalid := _INVALID.search(text)) is not None:
        return StoreError(
            f"{what}: there is an object named {invalid[1]!r}, and the parts of a name may not be empty, . or .., nor "
            "hold line breaks. Rename or remove it, or use a prefix that it does not begin with"
        )
    if "Could not parse path" in text:
        return ArgumentError(f"{what}: not a path that an object store can have (empty parts, . and .. are refused)")
    if (setting := _SETTING.search(text)) is not None:
        return ArgumentError(f"{what}: {setting[0]}; see options={{...}} of open_store")
    return StoreError(f"{what}: {type(error).__name__} of obstore, which is neither a status nor a broken connection")


def no_ranges(what: str) -> str:
    """What is said of a server that gives whole objects only."""
    return f"{what}: the server ignores ranges; copy the object to where ranges can be read"


def of_status(status: int, code: str, what: str) -> Exception:
    """The exception for an answer with this HTTP status and, where the server gives one, error code."""
    if status in PASSING or code in _PASSING_CODES:
        return TransientError(f"status {status} {code}".rstrip(), throttled=status in THROTTLED or code == "SlowDown")
    told = f"(status {status}{', ' + code if code else ''})"
    if code in _STALE:
        return AccessDeniedError(f"{what}: the credentials have expired {told}; renew them, then resume")
    if status in (401, 403):
        reason = _DENIED.get(code, "the store refuses the credentials, or there are none")
        return AccessDeniedError(
            f"{what}: {reason} {told}. Check the credentials in the environment or options={{...}}"
        )
    if status == 404:
        missing = "there is no such bucket" if code == "NoSuchBucket" else "there is no such object"
        return ObjectNotFoundError(f"{what}: {missing} {told}")
    if status == 412:
        return ObjectChangedError(f"{what}: it is no longer the object that was asked for {told}; read its new version")
    if status == 416:
        return RangeError(f"{what}: the object ends before this range {told}; its index belongs to another version")
    return StoreError(f"{what}: the store refuses the request {told}; check the address")


def is_obstores(error: Exception, library: Any) -> bool:
    """Whether obstore raised it about a store, rather than Python about a mistake of ours."""
    return not isinstance(error, FeedlineError) and isinstance(
        error, (library.exceptions.BaseError, FileNotFoundError, PermissionError, ValueError)
    )
