"""Where we think that obstore looks for a bucket is where it does: its errors name the address."""

import re
from urllib.parse import urlsplit

import pytest

pytest.importorskip("obstore")
import obstore

from opal_connector.cli.server_process import free_port
from opal_connector.tiers.engines.object_store_settings import make_store
from opal_connector.tiers.engines.store_endpoints import (
    azure_account,
    azure_endpoint,
    google_endpoint,
    s3_endpoint,
)

S3, AZ, GS = "s3://bucket/p", "az://container/p", "gs://bucket/p"
ONE, OTHER = "{one}", "http://192.0.2.1:9"  # that one is for documentation: nobody has it
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "word", "AWS_REGION": "r"}
AZURE = {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", "AZURE_STORAGE_ACCOUNT_NAME": "account"}
GOOGLE = {"GOOGLE_SKIP_SIGNATURE": "true"}


@pytest.mark.parametrize(
    ("url", "environment", "options"),
    [
        (S3, {}, {"aws_endpoint": ONE}),
        (S3, {}, {"ENDPOINT_URL": ONE}),
        (S3, {"AWS_ENDPOINT": ONE}, {}),
        (S3, {"AWS_ENDPOINT_URL": ONE}, {}),
        (S3, {"AWS_ENDPOINT_URL_S3": ONE}, {}),
        (S3, {"AWS_ENDPOINT_URL_S3": ONE, "AWS_ENDPOINT_URL": OTHER}, {}),
        (S3, {"AWS_ENDPOINT_URL_S3": ONE}, {"aws_endpoint": OTHER}),
        (S3, {"AWS_ENDPOINT_URL": OTHER}, {"aws_endpoint_url": ONE}),
        (AZ, {}, {"azure_storage_endpoint": ONE, "allow_http": "true"}),
        (AZ, {}, {"azure_endpoint": ONE, "allow_http": "true"}),
        (AZ, {"AZURE_ENDPOINT": OTHER}, {"endpoint": ONE, "allow_http": "true"}),
        (AZ, {"AZURE_STORAGE_ENDPOINT": ONE}, {"allow_http": "true"}),
        (AZ, {"AZURE_ENDPOINT": ONE}, {"allow_http": "true"}),
        (AZ, {"AZURITE_BLOB_STORAGE_URL": ONE}, {"use_emulator": "true", "endpoint": OTHER}),
        (
            AZ,
            {"AZURITE_BLOB_STORAGE_URL": ONE, "AZURE_STORAGE_USE_EMULATOR": "true"},
            {"account_name": "another"},
        ),
        (GS, {}, {"google_base_url": ONE, "allow_http": "true"}),
        (GS, {"GOOGLE_BASE_URL": ONE}, {"allow_http": "true"}),
        (GS, {"GOOGLE_BASE_URL": OTHER}, {"base_url": ONE, "allow_http": "true"}),
    ],
)
def test_the_library_looks_where_we_say(
    url: str,
    environment: dict[str, str],
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody listens there, and the refusal names the address. HTTP is allowed for S3 by itself."""
    one = f"http://127.0.0.1:{free_port()}"
    environment = {name: value.format(one=one) for name, value in environment.items()}
    options = {name: value.format(one=one) for name, value in options.items()}
    for name, value in {**KEYS, **AZURE, **GOOGLE, **environment}.items():
        monkeypatch.setenv(name, value)
    store = make_store(url, options, 2.0)
    with pytest.raises(Exception, match="error") as caught:
        obstore.head(store, "key")
    asked = re.search(r"http://[^\s)\"]+", str(caught.value))
    assert asked is not None, caught.value
    assert f"http://{urlsplit(asked.group()).netloc}" == one

    lower = {name.lower(): value for name, value in options.items()}
    find = {"s3": s3_endpoint, "az": azure_endpoint, "gs": google_endpoint}[url[:2]]
    assert find(lower, {**AZURE, **environment}) == one
    if "use_emulator" in options or "AZURE_STORAGE_USE_EMULATOR" in environment:
        account = azure_account("", lower, AZURE)
        assert urlsplit(asked.group()).path.startswith(f"/{account}/container/")
