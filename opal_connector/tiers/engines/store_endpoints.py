"""Where the library `obstore` looks for a bucket: in its options, and in the environment."""

from collections.abc import Iterable, Mapping
from typing import Final

YES: Final = frozenset({"1", "true", "yes", "y", "on"})
_EMULATOR: Final = "http://127.0.0.1:10000"


def s3_endpoint(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The endpoint of S3, empty for Amazon's own.

    The service's own variable goes before everything, even before an option.
    """
    given = ("aws_endpoint", "aws_endpoint_url", "endpoint", "endpoint_url")
    return (
        environment.get("AWS_ENDPOINT_URL_S3")
        or first_of(options, given)
        or first_of(environment, ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    )


def azure_endpoint(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The endpoint of Azure, empty for Microsoft's own."""
    emulator = ("azure_storage_use_emulator", "use_emulator")
    if _is_set(options, emulator, environment, "AZURE_STORAGE_USE_EMULATOR"):
        return environment.get("AZURITE_BLOB_STORAGE_URL") or _EMULATOR
    given = ("azure_storage_endpoint", "azure_endpoint", "endpoint")
    return first_of(options, given) or first_of(
        environment, ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    )


def is_azure_fabric(options: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether accounts are those of Microsoft Fabric."""
    fabric = ("azure_use_fabric_endpoint", "use_fabric_endpoint")
    return _is_set(options, fabric, environment, "AZURE_USE_FABRIC_ENDPOINT")


def azure_account(in_url: str, options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The account: an option goes before the URL, and the URL before the environment."""
    given = first_of(options, ("azure_storage_account_name", "account_name"))
    return given or in_url or environment.get("AZURE_STORAGE_ACCOUNT_NAME", "")


def google_endpoint(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The endpoint of Google's storage, empty for its own."""
    given = first_of(options, ("google_base_url", "base_url"))
    return given or environment.get("GOOGLE_BASE_URL", "")


def is_virtual_hosted(options: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether the endpoint of S3 has the bucket's name in its own."""
    names = ("aws_virtual_hosted_style_request", "virtual_hosted_style_request")
    return _is_set(options, names, environment, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")


def first_of(given: Mapping[str, str], names: Iterable[str]) -> str:
    """The value of the first of these names that has one."""
    return next((given[name] for name in names if given.get(name)), "")


def _is_set(
    options: Mapping[str, str],
    names: Iterable[str],
    environment: Mapping[str, str],
    variable: str,
) -> bool:
    text = first_of(options, names) or environment.get(variable, "")
    return text.strip().lower() in YES
