"""Azurite, Microsoft's own stand-in for Azure's blob storage."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

import obstore
from obstore.store import AzureStore
from servers import MissingServerError, free_port, listens, program, running

INSTALLED = Path(__file__).parents[2] / "build" / "azurite"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every Azurite has; it is printed in its documentation and opens nothing else."""


@dataclass(frozen=True)
class Azure:
    """An Azure server, and its key of full access."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        """For `open_store`."""
        return {"endpoint": self.endpoint, "account_name": _ACCOUNT, "account_key": _KEY}

    def container(self, objects: Mapping[str, bytes]) -> str:
        """A new container with these objects; its name."""
        name = f"test-{uuid4().hex[:12]}"
        self._make(name)
        store: Any = AzureStore(name, config=self.options, client_options={"allow_http": True})
        for path, data in objects.items():
            obstore.put(store, path, data)
        return name

    def link(self, container: str, path: str) -> str:
        """A link to an object, with a shared access signature for GET."""
        store: Any = AzureStore(container, config=self.options, client_options={"allow_http": True})
        return obstore.sign(store, "GET", path, timedelta(minutes=5))

    def put_key(self, container: str, key: str, data: bytes) -> None:
        """Put an object under any key."""
        self._put(f"{container}/{quote(key, safe='/~')}", data, blob_type="BlockBlob")

    def make_public(self, container: str) -> None:
        """Make a container public, for listing and reading."""
        self._put(container, b"", {"restype": "container", "comp": "acl"}, blob_public_access="container")

    def _make(self, name: str) -> None:
        self._put(name, b"", {"restype": "container"})

    def _put(self, path: str, data: bytes, query: Mapping[str, str] = MappingProxyType({}), **headers: str) -> None:
        """Send a request signed with the account's key, as in Azure's documentation, which obstore cannot do."""
        special = {f"x-ms-{name.replace('_', '-')}": value for name, value in headers.items()}
        special |= {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        reported = "".join(f"{header}:{value}\n" for header, value in sorted(special.items()))
        asked = "".join(f"\n{name}:{value}" for name, value in sorted(query.items()))
        text = f"PUT\n\n\n{len(data) or ''}" + "\n" * 9 + f"{reported}/{_ACCOUNT}/{_ACCOUNT}/{path}{asked}"
        signature = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
        special["Authorization"] = f"SharedKey {_ACCOUNT}:{signature}"
        address = f"{self.endpoint}/{path}?{urlencode(query)}".rstrip("?")
        with urlopen(Request(address, data=data, headers={**special, "Content-Type": ""}, method="PUT")):
            pass


@contextmanager
def azurite(folder: Path) -> Iterator[Azure]:
    """A server that is ready, its data in memory."""
    script = INSTALLED / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not script.exists():
        raise MissingServerError(
            f"azurite is not installed in {INSTALLED}, and these tests run against it: scripts/system-packages --test"
        )
    port = free_port()
    settings = ["--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    command = [program("node", "nodejs"), str(script), *settings]
    with running(command, lambda: listens(port), folder / "azurite.out"):
        yield Azure(f"http://127.0.0.1:{port}/{_ACCOUNT}")
