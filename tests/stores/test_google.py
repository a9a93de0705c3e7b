"""Google's credentials and servers, as known without a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google_cases import without_credentials

from feedline import stores
from feedline.errors import ArgumentError, TransientError
from feedline.stores import obstore_client
from feedline.stores.obstore_errors import translate_error

PEM = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
ACCOUNT = {"type": "service_account", "client_email": "secret@x", "private_key_id": "1", "private_key": "secret"}


@pytest.fixture(autouse=True)
def anonymous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_credentials(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be opened\\. Check the path"),
        ("{not JSON", "cannot be read\\. They must be the JSON file"),
        ("{}", "cannot be read\\. They must be the JSON file"),
        (json.dumps({"type": "external_account", "audience": "secret"}), "cannot be read. .*bearer_token"),
        (json.dumps({**ACCOUNT, "private_key": ["secret"]}), "cannot be read"),
        (json.dumps(ACCOUNT), "contain no readable RSA private key"),
        (
            json.dumps({**ACCOUNT, "private_key": PEM}),
            "RSA",
        ),
    ],
)
def test_a_wrong_file_is_an_error_with_the_store_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, words: str
) -> None:
    file = tmp_path / "secret.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(name, str(file))
    with pytest.raises(stores.AccessDeniedError, match=f"gs://bucket: .*{name}.*{words}") as caught:
        stores.open_store("gs://bucket/folder").read("x")
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_key_that_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "secret.json")
    with pytest.raises(stores.AccessDeniedError, match=r"gs://bucket: .*Remove one of them"):
        stores.open_store("gs://bucket", options={"service_account_key": "{}"}).size("x")


@pytest.mark.parametrize(
    "server", ["localhost:4443", "http:localhost", "https://", "http://a b", " http://a", "ftp://a"]
)
def test_a_server_that_is_no_address(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    for options in ({"endpoint": server}, {"base_url": server}):
        with pytest.raises(ArgumentError, match="gs://bucket: an endpoint is the address of a server"):
            stores.open_store("gs://bucket", options=options).size("x")
    monkeypatch.setenv("GOOGLE_BASE_URL", server)
    with pytest.raises(ArgumentError, match="gs://bucket: an endpoint is the address of a server"):
        stores.open_store("gs://bucket").size("x")


def test_the_server_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstore_client.settings({"GOOGLE_BEARER_TOKEN": "t"}) == {"bearer_token": "t"}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:9023")
    assert obstore_client.settings({}) == {"base_url": "http://localhost:9023", "skip_signature": True}
    assert obstore_client.settings({"skip_signature": False})["skip_signature"] is False
    monkeypatch.setenv("GOOGLE_BASE_URL", "https://private/")
    assert obstore_client.settings({}) == {"base_url": "https://private"}
    assert obstore_client.settings({"base_url": "https://one"}) == {"base_url": "https://one"}
    assert obstore_client.settings({"base_url": "https://one", "endpoint": "https://two"}) == {
        "base_url": "https://two"
    }


METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
TOKEN = "Generic GCS error: Error performing token request: Error performing"
NON_2XX = "Server returned non-2xx status code:"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            f"{TOKEN} GET {METADATA} in 1ms - {NON_2XX} 404 Not Found: secret",
            stores.AccessDeniedError,
            "no credentials",
        ),
        (f"{TOKEN} GET {METADATA} in 1ms - {NON_2XX} 403 No: secret", stores.AccessDeniedError, "no credentials"),
        (f"{TOKEN} GET {METADATA} - HTTP error\nkind: Connect,", stores.AccessDeniedError, "APPLICATION_CREDENTIALS"),
        (f"{TOKEN} GET {METADATA} in 1ms - {NON_2XX} 503 Busy: secret", TransientError, "status 503"),
        (f"{TOKEN} POST https://accounts.x/token - {NON_2XX} 400 No: secret", stores.AccessDeniedError, "gcloud auth"),
        (f"{TOKEN} POST https://accounts.x/token - HTTP error\nkind: Connect,", TransientError, "no connection"),
        (f"Generic GCS error: {NON_2XX} 404 Not Found: error: Invalid RSA key", stores.ObjectNotFoundError, "no such"),
    ],
)
def test_answers_about_credentials_are_not_taken_for_answers_about_objects(text: str, kind: type, words: str) -> None:
    error: Any = translate_error(ValueError(text), "gs://bucket/x")
    assert type(error) is kind
    assert words in str(error)
    assert "secret" not in str(error)


def test_each_cloud_has_its_own_variables() -> None:
    text = "Error performing GET http://169.254.169.254/x - no route"
    for scheme, name in (("s3", "AWS_ACCESS"), ("s3a", "AWS_ACCESS"), ("az", "AZURE_STORAGE"), ("gcs", "GOOGLE_APPL")):
        assert name in str(translate_error(ValueError(text), f"{scheme}://b/k"))
    assert type(translate_error(ValueError(text), "http://169.254.169.254/x")) is stores.StoreError
