"""The formats in a real S3, also in worker processes, and on a web server, which has no listings."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from ceph import S3
from fault_proxy import FaultProxy, Faults
from format_cases import equal

from feedline.stores import AccessDeniedError
from formats.format import epoch
from formats.places import Bucket, Place, options, small_pieces
from formats.suite import READERS, Corpus, FormatSuite, law

FAULTS = ("reset", "503", "slow", "truncated", "short")


class TestServers(FormatSuite):
    places = ("s3", "s3, cached", "web")

    @law(few=("web",), of=lambda form: not form.lists)
    def test_a_server_that_lists_nothing_will_do(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        assert equal(epoch(corpus.open(place)), corpus.expected)

    @law(fewest=("s3",))
    def test_wrong_keys_are_named(self, corpus: Corpus, place: Bucket, s3: S3) -> None:
        place.fill(corpus.files)
        place.store["options"] = {**options(s3), "secret_access_key": "wrong"}
        with pytest.raises(AccessDeniedError, match=place.root.partition("/test-")[0]):
            corpus.open(place)[0]

    def test_faults_on_one_request_in_twenty_change_nothing(
        self, corpora: Callable[[str], Corpus], faulty_s3: tuple[S3, FaultProxy], bucket: str, tmp_path: Path, keys: S3,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr("feedline.stores.retry._THROTTLED_S", 0.01)
        server, proxy = faulty_s3
        proxy.faults = Faults(share=0.05, slow_s=0.05, kinds=FAULTS)
        expected = {name: corpora(name).local for name in READERS}

        def check(name: str) -> None:
            corpus, prefix = corpora(name), uuid4().hex
            Bucket(keys, bucket, prefix).fill(corpus.files)
            for store in ({}, {"cache": small_pieces(tmp_path)}):
                place = Bucket(server, bucket, prefix, **store)
                place.copies = small_pieces(tmp_path)
                assert equal(epoch(corpus.open(place), num_workers=2, worker_method="thread"), expected[name]), name

        with ThreadPoolExecutor(8) as pool:  # most of the time they wait before the next attempt
            list(pool.map(check, READERS))
        assert min(proxy.happened[kind] for kind in FAULTS) > 0
