"""What the tests of the cluster share."""

from collections.abc import Iterator

import pytest

from opal_connector.cluster.publisher import Publisher


@pytest.fixture
def channels() -> Iterator[list[Publisher]]:
    """Channels to be closed."""
    opened: list[Publisher] = []
    yield opened
    for publisher in opened:
        publisher.close()
        assert not publisher.is_alive
