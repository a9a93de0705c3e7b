"""Requests to buckets as signed links, for names that obstore refuses.

These are links with a query, and keys with empty parts or control characters. A link is signed with the credentials of
the store. It is a plain address if the store needs none, or if a token is sent with the request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, unquote_plus, urlencode
from xml.etree import ElementTree as ET

from feedline.core.caches import PerProcess
from feedline.errors import InvalidNameError, RegionError, StoreError, TransientError
from feedline.stores.base import ObjectInfo, unversioned
from feedline.stores.links import as_link, split_link
from feedline.stores.obstore_client import AZURE, GOOGLE, S3, Client, ObstoreKind, RangeAnswer, open_checked, settings
from feedline.stores.obstore_errors import is_obstore_error
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange
from feedline.stores.web import WebReader

_ODD = re.compile(r"(?:^|/)(?:/|$)|[\x00-\x1f\x7f]|(?:^|/)\.\.?(?:/|$)")
"""Keys that obstore refuses as paths."""


_DOTS = re.compile(r"(?:^|/)\.\.?(?:/|$)")
"""Keys that no address can hold: `.` and `..` are resolved before an address is signed."""


_LINK_LIFETIME = timedelta(hours=1)


_KEYS = ("account_key", "access_key", "master_key")
"""Options with the key of an account of Azure."""


_VERSION = "2020-12-06"
"""The version of Azure's interface."""


class ListedPage(NamedTuple):
    """One page of a listing.

    `following` are the parameters for the next one, None after the last.
    """

    infos: list[ObjectInfo]
    folders: set[str]
    following: dict[str, str] | None


class SignedReader(WebReader):
    """Requests for any key or query of a bucket."""

    kind: ObstoreKind

    def __init__(self, library: Any, root: str, options: StoreOptions, idle_s: float) -> None:
        super().__init__(root, options, idle_s)
        self._library, self._options = library, options
        self._is_anonymous = str(options.get("skip_signature", False)).lower() == "true"

    def first_page(self, prefix: str, offset: str, delimiter: str) -> dict[str, str]:
        """Parameters for the first page of a listing.

        Only keys after `offset`, if the server skips any.
        """
        fixed = {"delimiter": delimiter, "encoding-type": "url", "list-type": "2", "prefix": prefix}
        return {**fixed, "start-after": offset}

    def page(self, parameters: Mapping[str, str], what: str) -> ListedPage:
        """A page of a listing."""
        query = "&".join(f"{name}={quote(value, safe='~')}" for name, value in sorted(parameters.items()) if value)
        answer = self.whole(as_link("", query), what)
        try:
            return self._parse(ET.fromstring(bytes(answer.data)), parameters)  # noqa: S314 - expat bounds entities
        except ET.ParseError:
            raise TransientError("a listing that cannot be read") from None

    def _parse(self, page: ET.Element, parameters: Mapping[str, str]) -> ListedPage:
        space = page.tag.partition("}")[0] + "}" if page.tag.startswith("{") else ""
        token = page.findtext(f"{space}NextContinuationToken", "")
        # Not all S3-compatible servers encode keys on request. Those that do write a space as "+".
        decode = unquote_plus if page.findtext(f"{space}EncodingType") == "url" else str
        folders = {decode(each.findtext(f"{space}Prefix", "")) for each in page.iter(f"{space}CommonPrefixes")}
        following = {**parameters, "start-after": "", "continuation-token": token} if token else None
        infos = [_info(each, space, decode) for each in page.iter(f"{space}Contents")]
        return ListedPage(infos, {folder.removesuffix("/") for folder in folders}, following)

    def check(self) -> None:
        """Raise StoreError unless links can be signed, or need no signature."""
        self._address("")

    @abstractmethod
    def _bucket_address(self) -> str:
        """Address of the bucket."""

    @abstractmethod
    def _signed(self, address: str, query: str) -> str:
        """A link that may be read."""

    def _address(self, key: str) -> str:
        name, query = split_link(key)
        address = f"{self._bucket_address()}/{quote(name, safe='/~')}".removesuffix("/" if not name else "\0")
        if self._is_anonymous:
            return f"{address}?{query}" if query else address
        return self._signed(address, query)

    def _sign(self, more: dict[str, Any]) -> str:
        store = open_checked(
            self._library, self.kind, self._root, StoreOptions({**self._options.raw(), **more}), self._idle_s
        )
        link: str = self._library.sign(store, "GET", "-", _LINK_LIFETIME)
        return link

    def _check_is_file(self, headers: Any, key: str, what: str) -> None:
        """Accept all keys: they are exactly the keys of the bucket."""


class S3Reader(SignedReader):
    """Reader of S3 and compatible servers."""

    kind = S3

    def __init__(self, library: Any, root: str, options: StoreOptions, idle_s: float) -> None:
        super().__init__(library, root, options, idle_s)
        # These keys only serve to find the address of the bucket: they sign no request that is sent.
        keys = {"access_key_id": "-", "secret_access_key": "-"} if self._is_anonymous else {}
        self._base = self._sign(keys).partition("?")[0].removesuffix("/-")

    def check_region(self, what: str) -> None:
        """Raise RegionError if the server names another region."""
        with self._request("", what):
            pass

    def _bucket_address(self) -> str:
        return self._base

    def _signed(self, address: str, query: str) -> str:
        # obstore appends a path to its server address: S3 ignores parameters that begin with x-.
        place = f"{address}?{query}{'&' if query else ''}x-part="
        return self._sign({"endpoint": place, "virtual_hosted_style_request": True})


class GoogleReader(SignedReader):
    """Reader of Google Cloud Storage.

    With a service account, a token, or without credentials.
    """

    kind = GOOGLE

    def __init__(self, library: Any, root: str, options: StoreOptions, idle_s: float) -> None:
        super().__init__(library, root, options, idle_s)
        self._is_anonymous = str(settings(options).get("skip_signature", False)).lower() == "true"

    def _authorization(self) -> Mapping[str, str]:
        token = settings(self._options).get("bearer_token")
        return {} if token is None or self._is_anonymous else {"Authorization": f"Bearer {token}"}

    def _bucket_address(self) -> str:
        server = settings(self._options).get("base_url", "https://storage.googleapis.com")
        return f"{server}/{self._root.partition('://')[2]}"

    def _signed(self, address: str, query: str) -> str:
        if self._authorization():
            return f"{address}?{query}" if query else address
        # As for S3: Amazon's tools send a parameter of this name to Google, too.
        place = f"{address}?{query}{'&' if query else ''}x-id="
        try:
            return self._sign({"endpoint": place})
        except Exception as error:
            if not is_obstore_error(error, self._library):
                raise
        # Raised outside the handler: the context would be obstore's exception, whose text may contain a key.
        raise _unsigned_error(
            "the key of a service account (options={'service_account_path': ...}), with a token"
            " (options={'bearer_token': ...})"
        )


class AzureReader(SignedReader):
    """Reader of Azure Blob Storage.

    With the key of the account, a SAS, a token, or without credentials.
    """

    kind = AZURE

    def __init__(self, library: Any, root: str, options: StoreOptions, idle_s: float) -> None:
        super().__init__(library, root, options, idle_s)
        self._container, self._config = AZURE.arguments(root, dict(options))
        self._is_anonymous = str(self._option("skip_signature")).lower() == "true"

    def first_page(self, prefix: str, offset: str, delimiter: str) -> dict[str, str]:  # noqa: ARG002 - Azure skips none
        """The parameters for the first page of a listing."""
        return {"restype": "container", "comp": "list", "delimiter": delimiter, "prefix": prefix}

    def _parse(self, page: ET.Element, parameters: Mapping[str, str]) -> ListedPage:
        blobs = [each for each in page.iter("Blob") if each.findtext("Properties/ResourceType") != "directory"]
        marker = page.findtext("NextMarker", "")
        folders = {_azure_name(each).removesuffix("/") for each in page.iter("BlobPrefix")}
        return ListedPage(list(map(_azure_info, blobs)), folders, {**parameters, "marker": marker} if marker else None)

    def _option(self, *names: str) -> str | None:
        """Value of the first of these options that is set.

        Environment variables count, too.
        """
        environment = {name.lower(): value for name, value in os.environ.items() if name.startswith("AZURE_")}
        given = {**environment, **{name.lower(): str(value) for name, value in self._config.items()}}
        short = {name.removeprefix("azure_").removeprefix("storage_"): value for name, value in given.items()}
        return next((short[name] for name in names if name in short), None)

    def _bucket_address(self) -> str:
        server = self._option("endpoint") or f"https://{self._option('account_name')}.blob.core.windows.net"
        return f"{server.rstrip('/')}/{self._container}"

    def _authorization(self) -> Mapping[str, str]:
        token = self._option("bearer_token", "token")
        if token is None or self._is_anonymous or self._option("sas_key", "sas_token", *_KEYS) is not None:
            return {}
        # https://learn.microsoft.com/rest/api/storageservices/authorize-with-azure-active-directory
        return {"Authorization": f"Bearer {token}", "x-ms-version": _VERSION}

    def _signed(self, address: str, query: str) -> str:
        if self._authorization():
            return f"{address}?{query}" if query else address
        given = self._option("sas_key", "sas_token")
        signature = given.lstrip("?") if given else urlencode(self._signature())
        return f"{address}?{query}{'&' if query else ''}{signature}"

    def _signature(self) -> dict[str, str]:
        """A service SAS for reading and listing the container, of version 2020-12-06.

        https://learn.microsoft.com/rest/api/storageservices/create-service-sas
        """
        account, key = self._option("account_name"), self._option(*_KEYS)
        if account is None or key is None:
            raise _unsigned_error(
                "the key of the account, a SAS token (options={'sas_token': ...}) or another token"
                " (options={'bearer_token': ...})"
            )
        version, until = _VERSION, f"{datetime.now(UTC) + _LINK_LIFETIME:%Y-%m-%dT%H:%M:%SZ}"
        lines = ["rl", "", until, f"/blob/{account}/{self._container}", "", "", "", version, "c", *[""] * 7]
        try:
            secret = base64.b64decode(key, validate=True)
        except binascii.Error:
            secret = b""  # the server will report that it is wrong
        digest = hmac.digest(secret, "\n".join(lines).encode(), hashlib.sha256)
        return {"sp": "rl", "se": until, "sv": version, "sr": "c", "sig": base64.b64encode(digest).decode()}


def _unsigned_error(needed: str) -> StoreError:
    return StoreError(
        f"such names are read with {needed}, or without credentials where the bucket is public"
        " (options={'skip_signature': True})"
    )


READERS: dict[ObstoreKind, type[SignedReader]] = {each.kind: each for each in (S3Reader, GoogleReader, AzureReader)}


def _info(entry: ET.Element, space: str, decode: Callable[[str], str]) -> ObjectInfo:
    size = int(entry.findtext(f"{space}Size", "0"))
    etag = entry.findtext(f"{space}ETag", "").replace('"', "")
    return ObjectInfo(decode(entry.findtext(f"{space}Key", "")), size, etag or unversioned(size))


def _azure_info(entry: ET.Element) -> ObjectInfo:
    size = int(entry.findtext("Properties/Content-Length", "0"))
    etag = entry.findtext("Properties/Etag", "").replace('"', "")
    return ObjectInfo(_azure_name(entry), size, etag or unversioned(size))


def _azure_name(entry: ET.Element) -> str:
    """Name of an object or folder, whose odd characters may be quoted."""
    name = entry.find("Name")
    text = "" if name is None else name.text or ""
    return unquote(text) if name is not None and name.get("Encoded") == "true" else text


class SignedClient(Client):
    """Single requests to a bucket, some as signed links."""

    def __init__(self, kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> None:
        super().__init__(kind, root, options, idle_timeout_s)
        self._reader = PerProcess(lambda: READERS[kind](self._library, root, options, idle_timeout_s))

    def _call(self, what: str, call: Any) -> Any:
        try:
            return super()._call(what, call)
        except RegionError as error:
            if error.region:
                raise
            problem = error
        try:
            reader = self._reader()
            if isinstance(reader, S3Reader):
                reader.check_region(what)
        except RegionError as error:
            problem = error
        except (StoreError, TransientError):
            pass  # then the message does not name it
        raise problem

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object; its path is the key."""
        return self._reader().info(_check_key(key, what), what) if _ODD.search(key) else super().info(key, what)

    def get(self, key: str, part: PartialRange, what: str) -> None:
        """Fetch the rest of a range into `part`, as `Client.get` does."""
        if _ODD.search(key):
            self._reader().get(_check_key(key, what), part, what)
        else:
            super().get(key, part, what)

    def whole(self, key: str, what: str, most: int | None = None) -> RangeAnswer:
        """Read an object without a range request, as `Client.whole` does."""
        if _ODD.search(key):
            return self._reader().whole(_check_key(key, what), what)
        return super().whole(key, what, most)

    def page(self, pages: Iterator[Any], what: str) -> list[ObjectInfo] | None:
        """The next of these pages; None after the last one."""
        return next(pages, None) if isinstance(pages, _ListingPages) else super().page(pages, what)

    def odd_pages(self, prefix: str, offset: str | None, what: str) -> Iterator[Any]:
        """Pages of objects with any keys.

        StoreError if the credentials sign no links.
        """
        self._reader().check()
        return _ListingPages(self._reader(), prefix, offset or "", what)

    def folder(self, prefix: str, what: str) -> tuple[list[ObjectInfo], set[str]]:
        """List the objects and folders directly in a folder, in any order."""
        try:
            return super().folder(prefix, what)
        except InvalidNameError:
            pages = _ListingPages(self._reader(), prefix, "", what, delimiter="/")
            return [info for page in pages for info in page], pages.folders


def _check_key(key: str, what: str) -> str:
    if _DOTS.search(key):
        raise StoreError(
            f"{what}: the key has a part . or .., which no address can hold. Copy the object to another key, or leave "
            "it out"
        )
    return key


class _ListingPages:
    """Pages of a listing whose keys may be any text.

    `folders` are the folders that were found before.
    """

    def __init__(self, reader: SignedReader, prefix: str, offset: str, what: str, delimiter: str = "") -> None:
        self._reader, self._what = reader, what
        self._next: dict[str, str] | None = reader.first_page(prefix, offset, delimiter)
        self.folders: set[str] = set()

    def __iter__(self) -> Iterator[list[ObjectInfo]]:
        return self

    def __next__(self) -> list[ObjectInfo]:
        if self._next is None:
            raise StopIteration
        page = self._reader.page(self._next, self._what)
        self._next = page.following
        self.folders |= page.folders
        return page.infos
