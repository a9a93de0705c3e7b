"""Credentials that are missing, refused or not to be read, told with the remedy of their cloud.

Nothing of theirs is quoted, not even a path: where a path is expected, people put the key itself.
"""

from __future__ import annotations

import re

from feedline.stores.addresses import SCHEMES, scheme_of
from feedline.stores.problems import AccessDeniedError

_METADATA = re.compile(r"http://169\.254\.169\.254/|/computeMetadata/v1/instance/service-accounts/")
"""The servers that give a cloud's own machines their credentials, which obstore asks when it has no others."""

_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a JSON file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
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


def problem(text: str, what: str, status: int | None) -> AccessDeniedError | None:
    """The exception for what obstore says about credentials; None where it speaks of something else.

    `status` is that of the answer, if one came, which need not be the store's.
    """
    variables = _VARIABLES.get(SCHEMES.get(scheme_of(what), ""))
    if variables is not None and _METADATA.search(text) is not None:
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
