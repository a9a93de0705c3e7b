"""HTTP statuses and error codes of object stores as exceptions."""

from __future__ import annotations

from dataclasses import dataclass

from feedline.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectNotFoundError,
    RangeError,
    RegionError,
    StoreError,
    TransientError,
)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """The answer of a server that gives no data."""

    status: int
    code: str = ""
    """The error code in the body, as in `<Code>SlowDown</Code>`; answers to HEAD have none."""
    region: str = ""
    """The region that the server names instead of the requested one."""

    @property
    def shown(self) -> str:
        """Status and code for a message."""
        return f"status {self.status}{', ' + self.code if self.code else ''}"


_THROTTLING_CODES = frozenset(
    (
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "LimitExceededException",
        "PriorRequestNotComplete",
        "ProvisionedThroughputExceededException",
        "TooManyRequests",
        "TooManyRequestsException",
        "TransactionInProgressException",
        "ServerBusy",
    )
)
"""Codes that ask for fewer requests. S3 and similar stores send several of them with status 400."""


_TRANSIENT_CODES = _THROTTLING_CODES | {
    *("RequestTimeout", "RequestTimeoutException", "InternalError", "ServiceUnavailable", "OperationTimedOut"),
    *("OperationAborted", "ConditionalRequestConflict", "IncompleteBody"),
}


_STALE = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"})


_DENIED = {
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "InvalidAccessKeyId": "the server does not know the access key",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "AuthenticationFailed": "the account key or the signature is wrong",
    "AuthorizationFailure": "the account key or the signature is wrong",
    "AccessDenied": "the credentials may not read it",
    "PublicAccessNotPermitted": "this account cannot be read without credentials",
}


_PAYER = (
    'If the bucket makes the requester pay, options={"request_payer": True} accepts the costs; they belong to the '
    "owner of the credentials"
)


_ARCHIVED = frozenset({"InvalidObjectState", "BlobArchived", "BlobBeingRehydrated"})


_ELSEWHERE = frozenset(
    ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
)


_PERMANENT_CONFLICTS = _ARCHIVED | {"PublicAccessNotPermitted"}
"""Codes of status 409 that repeat however often the request is sent."""


def is_transient(status: int, code: str = "") -> bool:
    """True if a later request may succeed."""
    if status == 409:  # the object is being written, or its bucket changed
        return code not in _PERMANENT_CONFLICTS
    return status in (408, 425, 429) or 500 <= status < 600 or code in _TRANSIENT_CODES


def error_for(response: ErrorResponse, what: str) -> Exception:
    """The exception for an answer without data about `what`.

    A TransientError for a transient failure, else a permanent error with a remedy.
    """
    status, code = response.status, response.code
    if is_transient(status, code):
        throttled = status in (429, 503) or code in _THROTTLING_CODES
        return TransientError(f"status {status} {code}".rstrip(), throttled=throttled)
    if code in _STALE:
        return AccessDeniedError(f"{what}: the credentials have expired ({response.shown}); renew them, then resume")
    if code in _ARCHIVED:
        return archived_error(what, response.shown)
    if code in _ELSEWHERE or 300 <= status < 400:
        return region_error(what, response.region, response.shown)
    if status in (401, 403) or code in _DENIED:
        return _denied_error(response, what)
    return _other_error(response, what)


def archived_error(what: str, shown: str) -> StoreError:
    """The exception for an object in an archive, such as Glacier."""
    return StoreError(
        f"{what}: the object is archived ({shown}), as in Glacier or Azure's archive tier, and cannot be read from "
        "there. Restore it first (`aws s3api restore-object`, `az storage blob set-tier`), which takes minutes to "
        "hours, or leave it out"
    )


def region_error(what: str, region: str, shown: str) -> StoreError:
    """The exception for a bucket in another region ("" if unknown)."""
    if not what.startswith("s3"):
        return StoreError(f"{what}: the server redirects without an address ({shown}); check the address")
    remedy = f'options={{"region": "{region}"}}' if region else 'its own as options={"region": ...}'
    where = f"in the region {region}" if region else "in another region than requested"
    return RegionError(
        f"{what}: the bucket is {where} ({shown}). Give {remedy} or in AWS_REGION; with a server of your own "
        'check options={"endpoint": ...}',
        region,
    )


def _denied_error(response: ErrorResponse, what: str) -> Exception:
    reason = _DENIED.get(response.code, "the store refuses the credentials, or there are none")
    # Answers to HEAD have no code, and S3 has no special code for a bucket whose requester pays.
    payer = f". {_PAYER}" if what.startswith("s3") and response.code in ("", "AccessDenied") else ""
    return AccessDeniedError(
        f"{what}: {reason} ({response.shown}). Check the credentials in the environment or options={{...}}{payer}"
    )


def _other_error(response: ErrorResponse, what: str) -> Exception:
    status, code, detail = response.status, response.code, f"({response.shown})"
    if status in (404, 410):
        missing = "there is no such object"
        if code in ("NoSuchBucket", "ContainerNotFound"):
            missing = "there is no such bucket"
            detail += "; check its name, and the region or endpoint"
        return ObjectNotFoundError(f"{what}: {missing} {detail}")
    if status == 412:
        return ObjectChangedError(
            f"{what}: it is no longer the object that was requested {detail}; read its new version"
        )
    if status == 416:
        return RangeError(f"{what}: the object ends before this range {detail}; its index belongs to another version")
    if code == "UserProjectMissing":
        return AccessDeniedError(
            f"{what}: the requester pays for this bucket {detail}, and obstore cannot name a Google project to charge. "
            "Copy the objects to a bucket of your own, or read them with gcsfs and its requester_pays="
        )
    return StoreError(f"{what}: the store refuses the request {detail}; check the address")
