"""Links with signatures, and unusual web servers."""

from __future__ import annotations

import logging
import pickle
import random
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree as ET

import pytest
from web_servers import Handler, WebServer, serving

import feedline as fl
from feedline import stores
from feedline.errors import ArgumentError
from feedline.stores.links import decoded, encoded, keeps_escapes, unsigned
from feedline.stores.signed_requests import SignedReader

SECRET = "hunter2-very-secret"
CONTENT = random.Random(7).randbytes(300_000)
QUICK = stores.Retry(attempts=3, first_wait_s=0, max_wait_s=0, idle_timeout_s=10)


class Links(Handler):
    """`/signed/...` requires a signature and refuses HEAD; the other names describe their behavior."""

    def do_HEAD(self) -> None:
        if self.path.startswith(("/signed/", "/no-head/")):
            self.answer(403)
        else:
            self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.state.asked.append(self.path)
        place, _, name = unquote(url.path).lstrip("/").partition("/")
        if place == "signed" and SECRET not in url.query:
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif place in ("signed", "plain", "no-head", "api"):
            self._ranged(self.state.objects.get(name))
        elif name not in self.state.objects:
            self.answer(int(place) if place.isdecimal() else 404)
        else:
            self._odd(place, name, self.state.objects[name])

    def _odd(self, place: str, name: str, data: bytes) -> None:
        if place == "chunked":
            self._chunked(data, urlsplit(self.path).query)
        elif place == "loop":
            self.answer(302, headers={"Location": self.path})
        elif place == "moved":
            self.answer(302, headers={"Location": f"/plain/{quote(name)}"})
        elif place == "page":
            self.answer(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        elif place == "encoded":
            self.answer(200, b"\x1f\x8b not the file", {"Content-Encoding": "gzip"})
        elif place == "early":
            self._early(data)
        elif place == "wrong-range":
            self.answer(206, data[1:3], {"Content-Range": f"bytes 1-2/{len(data)}"})
        elif place == "unknown-size":
            self.answer(
                206 if self.headers.get("Range") else 200, data, {"Content-Range": f"bytes 0-{len(data) - 1}/*"}
            )
        else:
            self.answer(int(place))

    def _ranged(self, data: bytes | None) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if data is None:
            self.answer(404)
        elif wanted is None:
            self.answer(200, data, {"ETag": '"1"'})
        elif int(wanted[1]) >= len(data):
            self.answer(416, headers={"Content-Range": f"bytes */{len(data)}"})
        else:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            self.answer(
                206, data[start:stop], {"ETag": '"1"', "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            )

    def _chunked(self, data: bytes, query: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("ETag", 'W/"weak"')
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(data), 50_000):
            part = data[at : at + 50_000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        if "broken" in query:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _early(self, data: bytes) -> None:
        """Each connection breaks after 100,000 bytes."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        assert wanted is not None
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        self.send_response(206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:stop][:100_000])
            self.close_connection = stop - start > 100_000


@dataclass
class Content:
    """The objects of the server, and the requested paths."""

    objects: dict[str, bytes]
    asked: list[str] = field(default_factory=list)


Server = WebServer[Content]


@pytest.fixture
def server() -> Iterator[Server]:
    objects = {"a b.bin": CONTENT, "0.txt": b"zero", "1.txt": b"one", "empty.bin": b""}
    objects |= {"a//b.txt": b"empty part", "./dot.txt": b"dot"}
    with serving(Links, Content(objects)) as listening:
        yield listening


def link(server: Server, name: str, signature: str = SECRET, more: str = "") -> str:
    return f"{server.url}/signed/{name}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={signature}{more}"


def test_presigned_links_are_files(server: Server, tmp_path: Path) -> None:
    links = [link(server, name) for name in ("a%20b.bin", "0.txt", "1.txt", "empty.bin")]
    for cache in (None, tmp_path):
        data = fl.datasets.Files(links, cache=cache)
        assert [bytes(each) for each in data] == [CONTENT, b"zero", b"one", b""]
        assert [bytes(each) for each in data.__getitems__([2, 0])] == [b"one", CONTENT]
        assert list(data.paths) == [
            "signed/a b.bin\x1f",
            "signed/0.txt\x1f",
            "signed/1.txt\x1f",
            "signed/empty.bin\x1f",
        ]
    assert list(fl.datasets.Lines(links[1])) == ["zero"]


@pytest.mark.parametrize("query", ["", "?alt=media"])
def test_escapes_with_a_meaning_are_sent_as_written(server: Server, query: str) -> None:
    """Servers of objects tell `images%2Fa.txt`, one name, from a path of two parts, and some read + as a space."""
    server.state.objects |= {"images/a+b c.txt": b"found"}
    written = f"/plain/images%2Fa%2Bb%20c.txt{query}"
    assert fl.datasets.Files(server.url + written, decode="text")[0] == "found"
    assert set(server.state.asked) == {written}
    with pytest.raises(FileNotFoundError, match=r"images%2Fz%2B\.txt"):
        fl.datasets.Files(f"{server.url}/plain/images%2Fz%2B.txt{query}", decode="text")[0]


def test_ranges_of_a_link(server: Server) -> None:
    root, path = stores.split(link(server, "a%20b.bin"))
    store = stores.open_store(root)
    assert store.size(path) == len(CONTENT)
    assert store.read_many(path, [(5, 9), (200_000, 290_000)]) == [CONTENT[5:9], CONTENT[200_000:290_000]]
    assert store.read(path, 299_000) == CONTENT[299_000:]
    with pytest.raises(stores.RangeError):
        store.read(path, 299_999, 300_001)
    empty = stores.split(link(server, "empty.bin")).path
    assert (store.size(empty), store.read(empty)) == (0, b"")


def test_braces_share_a_query(server: Server) -> None:
    assert list(fl.datasets.Files(link(server, "{0..1}.txt"), decode="text")) == ["zero", "one"]


def test_links_work_in_worker_processes(server: Server) -> None:
    data = fl.datasets.Files([link(server, "0.txt"), link(server, "1.txt")], decode="text")
    with fl.DataLoader(data, 2, num_workers=1, worker_method="process") as loader:
        assert list(loader) == [["zero", "one"]]


def test_a_link_that_is_signed_again_is_the_same_object(server: Server, tmp_path: Path) -> None:
    first, second = (link(server, "a%20b.bin", f"{SECRET}-{number}", f"&X-Amz-Date={number}") for number in (1, 2))
    for address in (first, second):
        data = fl.datasets.Files(address, cache=tmp_path)
        assert data[0] == CONTENT
    asked = [path for path in server.state.asked if f"{SECRET}-2" in path]
    assert len(asked) == 1, "its content came from the cache, after a look at its version"
    assert fl.datasets.Files(first).listing_fingerprint == fl.datasets.Files(second).listing_fingerprint
    assert fl.datasets.Files(first).content_fingerprint == fl.datasets.Files(second).content_fingerprint


def test_other_parameters_tell_objects_apart() -> None:
    shown = [unsigned(stores.split(f"https://host/get?id={number}&sig=x{number}").path) for number in (1, 2, 1)]
    assert shown[0] == shown[2] != shown[1]
    assert stores.join("https://host", stores.split("https://host/a%3Fb?id=1&sig=2").path).startswith(
        "https://host/a%3Fb?id=~"
    )


def test_signatures_show_nowhere(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    wrong = [
        link(server, "missing.txt"),
        f"{server.url}/500/x.txt?sig={SECRET}",
        f"{server.url}/403/x.txt?sig={SECRET}",
        f"{server.url}/page/0.txt?sig={SECRET}",
        f"{server.url}/loop/0.txt?sig={SECRET}",
        f"{server.url}/a/../x.txt?sig={SECRET}",
    ]
    for address in wrong:
        for cache in (None, tmp_path):
            options = {"retry": QUICK}
            with pytest.raises((OSError, ValueError)) as caught:
                fl.datasets.Files(address, options=options, cache=cache)[0]
            texts.append("".join(traceback.format_exception(caught.value)))
            with pytest.raises((OSError, ValueError)) as caught:
                fl.datasets.Lines(address, options=options, cache=cache)
            texts.append("".join(traceback.format_exception(caught.value)))
    with pytest.raises(ArgumentError) as refused:
        fl.datasets.Files(f"{server.url}/{{0..3.tar?sig={SECRET}")
    data = fl.datasets.Files(link(server, "0.txt"), cache=tmp_path)
    root, path = stores.split(link(server, "0.txt"))
    texts += [str(refused.value), repr(data), repr(data.paths), repr(stores.open_store(root).info(path))]
    assert "missing.txt" in "".join(texts)
    assert SECRET not in "".join(texts) + caplog.text
    assert not [file for file in tmp_path.rglob("*") if SECRET in file.name]


def test_an_expired_link_says_so(server: Server) -> None:
    with pytest.raises(stores.AccessDeniedError) as caught:
        fl.datasets.Files(link(server, "0.txt", "expired"))[0]
    assert any("expired: request a new one" in note for note in caught.value.__notes__ + _notes(caught.value.__cause__))


def _notes(error: BaseException | None) -> list[str]:
    return getattr(error, "__notes__", []) if error else []


@pytest.mark.parametrize("query", ["", "?x=1"])
def test_bodies_without_a_length(server: Server, tmp_path: Path, query: str) -> None:
    for cache in (None, tmp_path):
        root, path = stores.split(f"{server.url}/chunked/a%20b.bin{query}")
        store = stores.open_store(root, cache=cache)
        assert store.size(path) == len(CONTENT)
        assert store.read(path) == CONTENT
        assert store.read_many(path, [(5, 9), (200_000, 290_000)]) == [CONTENT[5:9], CONTENT[200_000:290_000]]
        assert store.info(path).version == "W/weak"
    assert list(fl.datasets.Lines(f"{server.url}/chunked/0.txt{query}")) == ["zero"]


def test_a_body_without_a_length_that_breaks_off_is_no_data(server: Server) -> None:
    with pytest.raises(stores.StoreUnavailableError, match="3 attempts failed"):
        fl.datasets.Files(f"{server.url}/chunked/a%20b.bin?broken", options={"retry": QUICK})[0]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("loop", "redirects this address in a circle"),
        ("page", r"answered with a web page \(text/html\)"),
        ("encoded", "sends the file compressed .*gzip"),
        ("wrong-range", r"answered with .*bytes.* instead"),
        ("304", "status 304"),
        ("410", "no such object"),
    ],
)
def test_answers_that_are_not_the_file(server: Server, place: str, words: str) -> None:
    root, path = stores.split(f"{server.url}/{place}/0.txt")
    with pytest.raises(stores.StoreError, match=words):
        stores.open_store(root, retry=QUICK).read(path, 0, 3)


@pytest.mark.parametrize("query", ["", "?x=1"])
@pytest.mark.parametrize("place", ["plain", "moved", "no-head", "unknown-size"])
def test_answers_that_are(server: Server, place: str, query: str) -> None:
    root, path = stores.split(f"{server.url}/{place}/a%20b.bin{query}")
    store = stores.open_store(root)
    assert store.size(path) == len(CONTENT)
    assert store.read(path) == CONTENT
    assert store.read(path, 100, 200) == CONTENT[100:200]


@pytest.mark.parametrize("query", ["", "?x=1"])
def test_bytes_received_before_a_break_are_kept(server: Server, query: str) -> None:
    root, path = stores.split(f"{server.url}/early/a%20b.bin{query}")
    before = len(server.state.asked)
    assert stores.open_store(root, retry=QUICK).read(path, 0, len(CONTENT)) == CONTENT
    assert len(server.state.asked) - before <= 6


def test_keys_that_obstore_refuses_are_read_from_web_servers(server: Server) -> None:
    assert list(fl.datasets.Files(f"{server.url}/plain/a//b.txt", decode="text")) == ["empty part"]
    assert list(fl.datasets.Files(f"{server.url}/plain/./dot.txt", decode="text")) == ["dot"]


def test_a_link_is_no_store(server: Server) -> None:
    with pytest.raises(ArgumentError, match="Pass such a link to a dataset") as caught:
        stores.open_store(link(server, "0.txt"))
    assert SECRET not in str(caught.value)
    assert pickle.loads(pickle.dumps(stores.open_store(server.url))).read("plain/0.txt") == b"zero"


@pytest.mark.parametrize(
    ("written", "path"),
    [("a%20b%C3%A9.jpg", "a bé.jpg"), ("caf%E9.jpg", None), ("%C3%A9/%FF%2Fb+c", None), ("a%zz", "a%zz")],
)
def test_escapes_that_are_not_utf8_are_sent_as_written(written: str, path: str | None) -> None:
    assert encoded(decoded(written), "/+%") == written
    assert path in (None, decoded(written))
    assert keeps_escapes(decoded(written)) == (path is None)


def test_keys_of_encoded_listings_have_their_spaces() -> None:
    parts = "<Contents><Key>my+photo%2B1.jpg</Key><Size>3</Size><ETag>&quot;a&quot;</ETag></Contents>"
    folders = "<CommonPrefixes><Prefix>a+b/</Prefix></CommonPrefixes>"
    for encoding, names in (
        ("<EncodingType>url</EncodingType>", ("my photo+1.jpg", "a b")),
        ("", ("my+photo%2B1.jpg", "a+b")),
    ):
        page = ET.fromstring(f"<ListBucketResult>{encoding}{parts}{folders}</ListBucketResult>")
        found = SignedReader._parse(None, page, {})  # type: ignore[arg-type]
        assert ([info.path for info in found.infos], list(found.folders)) == ([names[0]], [names[1]])
