"""Ceph's S3 server with all its data in memory: one monitor, one store, one gateway."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen
from uuid import uuid4

import obstore
from obstore.store import S3Store
from servers import answers, done, free_port, listens, program, running

_CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{port}
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
debug rgw = 0
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class dir = {classes}
osd class load list = *
osd class default list = *
osd class update on start = false
osd crush update on start = false
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
[mon.a]
mon data = {folder}/mon
mon addr = v1:127.0.0.1:{port}
[osd.0]
osd data = {folder}/osd
"""

_ASKED, _STARTS = 20, 3


@dataclass(frozen=True)
class S3:
    """An S3 server, and its keys of full access."""

    endpoint: str
    access_key_id: str = "FEEDLINETESTKEY"
    secret_access_key: str = "feedline-test-secret"
    config: str = ""

    @property
    def options(self) -> dict[str, str]:
        """For `open_store`."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }

    def bucket(self, objects: Mapping[str, bytes] | None = None) -> str:
        """A new bucket with these objects; its name."""
        name = f"test-{uuid4().hex[:12]}"
        store = self._store(name)
        # obstore cannot create a bucket, but it signs the request for it.
        with urlopen(Request(obstore.sign(store, "PUT", "", timedelta(minutes=5)), method="PUT")):
            pass
        self.put(name, objects or {})
        return name

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        store = self._store(bucket)
        for name, data in objects.items():
            obstore.put(store, name, data)

    def link(self, bucket: str, key: str, method: str = "GET", query: str = "") -> str:
        """A presigned link to any key, also to one that obstore does not accept as a path."""
        # The whole address is signed, with obstore's path as the last parameter of its query.
        address = f"{self.endpoint}/{bucket}/{quote(key, safe='/~')}?{query}{'&' if query else ''}x-part="
        more = {"endpoint": address, "virtual_hosted_style_request": "true", "region": "us-east-1"}
        store = S3Store(bucket, config={**self.options, **more}, client_options={"allow_http": True})
        return obstore.sign(store, method, "x", timedelta(minutes=5))

    def put_key(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object under any key."""
        with urlopen(Request(self.link(bucket, key, "PUT"), method="PUT", data=data)):
            pass

    def make_public(self, bucket: str) -> None:
        """Make a bucket public, for listing and reading."""
        everything = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"]}
        places = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
        policy = {"Version": "2012-10-17", "Statement": [{**everything, "Resource": places}]}
        with urlopen(Request(self.link(bucket, "", "PUT", "policy="), method="PUT", data=json.dumps(policy).encode())):
            pass

    def remove(self, bucket: str, names: Iterable[str]) -> None:
        obstore.delete(self._store(bucket), list(names))

    def other_user(self) -> S3:
        """The same server with keys that may not read the buckets made so far."""
        name = f"u{uuid4().hex[:12]}"
        keys = (f"KEY{name}", f"secret-{name}")
        _make_user(self.config, name, *keys)
        return S3(self.endpoint, *keys, config=self.config)

    def _store(self, bucket: str) -> Any:
        return S3Store(bucket, config={**self.options, "region": "us-east-1"}, client_options={"allow_http": True})


@contextmanager
def radosgw(folder: Path) -> Iterator[S3]:
    """A server that is ready, in about ten seconds."""
    server, stack = _started(folder)
    with stack:
        yield server


def _started(folder: Path) -> tuple[S3, ExitStack]:
    """A server, and a function that stops it. Other ports are tried if another process takes one before Ceph does."""
    for attempt in range(_STARTS):
        try:
            with ExitStack() as stack:
                return _start(folder / str(attempt), stack), stack.pop_all()
        except RuntimeError as error:
            failure = error
    raise failure


def _start(folder: Path, stack: ExitStack) -> S3:
    port, mon_port = free_port(), free_port()
    config = _prepared(folder, mon_port)
    _start_store(folder, config, mon_port, stack)
    frontend = f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1"  # without it, 44 ms for each range
    gateway = ["-n", "client.rgw", "--no-mon-config", "--rgw-frontends", frontend, "-f"]
    command = [program("radosgw", "radosgw"), "-c", config, *gateway]
    stack.enter_context(running(command, lambda: answers(f"http://127.0.0.1:{port}/"), folder / "rgw.out", "KILL"))
    server = S3(f"http://127.0.0.1:{port}", config=config)
    _make_user(config, "tester", server.access_key_id, server.secret_access_key)
    return server


def _prepared(folder: Path, mon_port: int) -> str:
    for name in ("mon", "osd"):
        (folder / name).mkdir(parents=True)
    fsid, config, keyring, monmap = str(uuid4()), folder / "ceph.conf", str(folder / "keyring"), str(folder / "monmap")
    # In Debian 13, the default is a relative path.
    classes = next((str(place) for place in Path("/usr").glob("lib*/**/rados-classes")), "")
    config.write_text(_CONFIG.format(fsid=fsid, folder=folder, port=mon_port, classes=classes))
    tools = [program(name, "ceph-common") for name in ("ceph-authtool", "monmaptool")]
    done(tools[0], "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    done(tools[1], "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
    monitor = program("ceph-mon", "ceph-mon")
    done(monitor, "-c", str(config), "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    return str(config)


def _start_store(folder: Path, config: str, mon_port: int, stack: ExitStack) -> None:
    monitor = [program("ceph-mon", "ceph-mon"), "-c", config, "-i", "a", "-f"]
    stack.enter_context(running(monitor, lambda: listens(mon_port), folder / "mon.out", "KILL"))
    uuid = str(uuid4())
    number = _asked(config, "osd", "new", uuid).strip()
    # The store would do this itself, but does not retry as `_asked` does.
    _asked(config, "osd", "crush", "add", f"osd.{number}", "1.0", "root=default", "host=here")
    store = [program("ceph-osd", "ceph-osd"), "-c", config, "-i", number]
    done(*store, "--mkfs", "--osd-uuid", uuid)

    def up() -> bool:
        return '"num_up_osds":1' in _asked(config, "osd", "stat", "-f", "json")

    stack.enter_context(running([*store, "-f"], up, folder / "osd.out", "KILL"))


def _asked(config: str, *command: str) -> str:
    """The monitor's answer. Sometimes it mistakes a new client for one of another cluster."""
    for _ in range(_ASKED):
        try:
            return done(program("ceph", "ceph-common"), "-c", config, "--connect-timeout", "60", *command)
        except RuntimeError as error:
            failure = error
            if "EPERM" not in str(error):
                raise
    raise failure


def _make_user(config: str, name: str, access_key: str, secret_key: str) -> None:
    user = ["--uid", name, "--display-name", name, "--access-key", access_key, "--secret-key", secret_key]
    done(program("radosgw-admin", "radosgw"), "-c", config, "user", "create", *user)
