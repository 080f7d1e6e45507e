"""Instances that write to one place have one name for it, and those that do not have others."""

import socket
from typing import Any

import pytest

from opal_connector.config import load_config
from opal_connector.tiers.engines import engine_identity

HOSTS = ("here", "there")
S3 = "s3://bucket/prefix"
AZ = "az://container/prefix"
GS = "gs://bucket/prefix"
ACCOUNT = {"azure_storage_account_name": "account"}


def identity(name: str, environment: dict[str, str] | None = None, **settings: Any) -> str:
    """The identity of a store with these settings, in this environment."""
    extra = {"kvc_tiers": ["CPUMemory", name], name: settings}
    found = load_config(extra).shared_tier()
    assert found is not None
    return engine_identity(found[1], environment or {})  # type: ignore[arg-type]


def valkey(url: str, **settings: Any) -> str:
    return identity("Valkey", url=url, **settings)


def bucket(url: str, environment: dict[str, str] | None = None, /, **options: str) -> str:
    return identity("ObjectStore", environment, url=url, options=options)


def mooncake(master: str, **settings: Any) -> str:
    return identity("Mooncake", master=master, metadata="P2PHANDSHAKE", **settings)


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(socket, "gethostname", lambda: request.param)
    name: str = request.param
    return name


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://:secret@host:6379/0",
        "rediss://user:secret@HOST.:6379/",
        "redis://host/0?password=secret&socket_keepalive=yes",
        "redis://host/7?db=0",
        "redis://host?db=00",
    ],
)
def test_one_database_of_valkey(url: str) -> None:
    """Credentials, options, TLS and spellings are not the place."""
    assert valkey(url) == valkey("redis://host:6379/0")


@pytest.mark.parametrize(
    "url",
    ["redis://other:6379/0", "redis://host:6380/0", "redis://host/1", "redis://host?db=1"],
)
def test_other_databases_of_valkey(url: str) -> None:
    """Host, port and database are the place."""
    assert valkey(url) != valkey("redis://host:6379/0")


def test_prefixes_are_places() -> None:
    """Nobody finds what others wrote under another prefix."""
    assert valkey("redis://host", prefix="b") != valkey("redis://host")
    assert mooncake("host:1", prefix="b") != mooncake("host:1")
    assert bucket("s3://bucket/b") != bucket("s3://bucket/a") != bucket("s3://bucket")


def test_sockets_are_by_path_and_database(host: str) -> None:
    """There is no port."""
    urls = ["unix:///run/a", "unix:///run/b", "unix:///run/a?db=1"]
    assert len({valkey(url) for url in urls}) == 3
    assert valkey("unix://:secret@/run//a?db=0") == valkey("unix:///run/a")


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "127.0.0.1",
        "127.0.0.5",
        "[::1]",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "db.localhost",
    ],
)
def test_a_loopback_address_is_another_server_on_every_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server beside every engine has one address everywhere, and is not shared."""
    found: dict[str, set[str]] = {"valkey": set(), "bucket": set(), "azure": set(), "google": set()}
    for host in HOSTS:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        found["valkey"].add(valkey(f"redis://{name}:6379"))
        found["bucket"].add(bucket(S3, aws_endpoint=f"http://{name}:9000"))
        found["azure"].add(bucket(AZ, **ACCOUNT, azure_endpoint=f"http://{name}:9000"))
        found["google"].add(bucket(GS, google_base_url=f"http://{name}:9000"))
    assert {kind: len(names) for kind, names in found.items()} == dict.fromkeys(found, 2)


def test_a_master_or_a_socket_of_this_host_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with addresses of the loopback."""
    found = set()
    for host in HOSTS:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        found |= {mooncake("127.0.0.1:50051"), valkey("unix:///run/valkey")}
        found |= {bucket(AZ, **ACCOUNT, use_emulator="true")}
        assert mooncake("localhost:50051") == mooncake("127.0.0.1:50051")
    assert len(found) == 6


def test_loopback_names_of_one_host_are_one(host: str) -> None:
    """Instances on one host may spell it differently."""
    names = ("localhost", "127.0.0.1", "[::1]", "LOCALHOST", "0.0.0.0", "[::ffff:127.0.0.1]")
    assert len({valkey(f"redis://{name}") for name in names}) == 1


def test_addresses_that_all_hosts_reach_are_the_same_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's own name is no part of them."""
    found = []
    for host in HOSTS:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        found.append(
            (
                valkey("redis://10.0.0.1"),
                mooncake("master:1"),
                bucket(S3),
                bucket(AZ, **ACCOUNT),
                bucket(S3, aws_endpoint="http://minio:9000"),
                valkey("redis://localhost", shared_name="ours"),
            )
        )
    assert found[0] == found[1]


def test_masters_are_by_host_and_port() -> None:
    """How the metadata are reached is not the place."""
    assert mooncake("host:1") != mooncake("host:2") != mooncake("other:2")
    assert mooncake("HOST:1") == mooncake("host:1")
    assert mooncake("host:1") == identity("Mooncake", master="host:1", metadata="http://m/metadata")


MINIO = "http://minio:9000"


@pytest.mark.parametrize(
    ("url", "environment", "options"),
    [
        ("s3a://bucket/prefix/", {}, {"aws_endpoint": MINIO}),
        (S3, {}, {"endpoint": "http://MINIO:9000/"}),
        (S3, {}, {"AWS_ENDPOINT_URL": MINIO}),
        (S3, {}, {"endpoint_url": MINIO, "aws_secret_access_key": "x", "aws_region": "r"}),
        (S3, {"AWS_ENDPOINT_URL": MINIO}, {}),
        (S3, {"AWS_ENDPOINT": MINIO}, {}),
        (S3, {"AWS_ENDPOINT_URL_S3": MINIO, "AWS_ENDPOINT": "http://other"}, {}),
        (S3, {"AWS_ENDPOINT_URL_S3": MINIO}, {"aws_endpoint": "http://other"}),
        (S3, {"AWS_ENDPOINT_URL": "http://other"}, {"aws_endpoint": MINIO}),
        ("s3://other/prefix", {}, {"bucket": "bucket", "endpoint": MINIO}),
        (
            S3,
            {},
            {"aws_endpoint": "http://bucket.minio:9000", "virtual_hosted_style_request": "true"},
        ),
        (
            S3,
            {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            {"aws_endpoint": "http://bucket.minio:9000"},
        ),
    ],
)
def test_one_bucket_of_s3(url: str, environment: dict[str, str], options: dict[str, str]) -> None:
    """All spellings of an endpoint, and those of the environment, as the library takes them."""
    assert bucket(url, environment, **options) == bucket(S3, aws_endpoint=MINIO)
    assert bucket(url, environment, **options) != bucket(S3)


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://s3.us-east-1.amazonaws.com",
        "https://s3-eu-west-1.amazonaws.com/",
        "https://bucket.s3.us-gov-west-1.amazonaws.com",
        "https://s3.dualstack.eu-central-1.amazonaws.com",
        "https://bucket.vpce-1a2b-3c4d.s3.us-east-1.vpce.amazonaws.com",
    ],
)
def test_amazons_own_endpoints_are_one_place(endpoint: str) -> None:
    """A bucket has one name in all regions."""
    assert bucket(S3, aws_endpoint=endpoint) == bucket(S3)


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://s3.cn-north-1.amazonaws.com.cn",
        "https://minio-1.us-east-1.elb.amazonaws.com",
        "https://s3-minio-1.us-east-1.elb.amazonaws.com",
        "https://s3.example.com",
    ],
)
def test_other_endpoints_are_others(endpoint: str) -> None:
    """A server of one's own at Amazon is not Amazon's."""
    assert bucket(S3, aws_endpoint=endpoint) != bucket(S3)


@pytest.mark.parametrize(
    ("url", "environment", "options"),
    [
        ("azure://container/prefix/", {}, {"account_name": "account"}),
        ("abfs://container/prefix", {}, {"AZURE_STORAGE_ACCOUNT_NAME": "account"}),
        ("abfss://container@account.dfs.core.windows.net/prefix", {}, {}),
        (
            "abfss://container@account.dfs.core.windows.net/prefix",
            {"AZURE_STORAGE_ACCOUNT_NAME": "other"},
            {},
        ),
        ("abfss://container@other.dfs.core.windows.net/prefix", {}, ACCOUNT),
        (AZ, {"AZURE_STORAGE_ACCOUNT_NAME": "account"}, {"azure_storage_account_key": "a2V5"}),
        (AZ, {}, {**ACCOUNT, "azure_endpoint": "https://account.blob.core.windows.net/"}),
    ],
)
def test_one_container_of_azure(
    url: str, environment: dict[str, str], options: dict[str, str]
) -> None:
    """The account may stand in the options, in the URL or in the environment."""
    assert bucket(url, environment, **options) == bucket(AZ, **ACCOUNT)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, {"account_name": "other"}),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "other"}, {}),
        ({}, {**ACCOUNT, "azure_endpoint": "http://other:1"}),
        ({}, {**ACCOUNT, "azure_storage_endpoint": "http://other:1"}),
        ({"AZURE_STORAGE_ENDPOINT": "http://other:1"}, ACCOUNT),
        ({"AZURE_ENDPOINT": "http://other:1"}, ACCOUNT),
        ({}, {**ACCOUNT, "azure_use_fabric_endpoint": "true"}),
        ({"AZURE_STORAGE_USE_EMULATOR": "true"}, ACCOUNT),
        ({"AZURITE_BLOB_STORAGE_URL": "http://azurite:1"}, {**ACCOUNT, "use_emulator": "true"}),
    ],
)
def test_other_containers_of_azure(environment: dict[str, str], options: dict[str, str]) -> None:
    """Every account has containers of the same names."""
    assert bucket(AZ, environment, **options) != bucket(AZ, **ACCOUNT)


def test_one_container_of_fabric() -> None:
    """By the option, by the URL or by the endpoint."""
    url = "abfss://container@account.dfs.fabric.microsoft.com/prefix"
    endpoint = "https://account.blob.fabric.microsoft.com"
    option = bucket(AZ, **ACCOUNT, use_fabric_endpoint="true")
    assert bucket(url) == option == bucket(AZ, **ACCOUNT, azure_endpoint=endpoint)


def test_buckets_of_google_are_by_endpoint() -> None:
    """There is one of Google's own."""
    base = "http://other:1"
    assert bucket(GS, google_base_url=base) == bucket(GS, {"GOOGLE_BASE_URL": base}) != bucket(GS)
    assert bucket(GS, base_url=base) == bucket(GS, google_base_url=base)
    assert bucket(GS, base_url="https://storage.googleapis.com") == bucket(GS)


def test_providers_do_not_share_names() -> None:
    """A bucket of S3 is none of Google's."""
    assert len({bucket("s3://b/p"), bucket("gs://b/p"), bucket("az://b/p", **ACCOUNT)}) == 3


def test_a_shared_name_overrides_the_address() -> None:
    """For those who write it differently."""
    ours = {"shared_name": "ours"}
    assert valkey("redis://host", **ours) == valkey("redis://10.0.0.1/3", **ours)
    assert valkey("redis://host", **ours) != valkey("redis://host")
