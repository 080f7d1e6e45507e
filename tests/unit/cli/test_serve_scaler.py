"""The loop that scales goes on, whatever one look at the queues ended in."""

import asyncio
from typing import Any

import pytest
from serve_world import fake_cluster

from opal_connector.cli.serving import scaler as scaling
from opal_connector.cli.serving.scaler import Scaler

PATIENCE_SECONDS = 20.0


class Failing:
    """A cluster of which nothing can be told."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.supervisors: dict[str, Any] = {}
        self.looks = 0

    @property
    def core(self) -> Any:
        self.looks += 1
        raise OSError("no ports are free")


def test_a_look_that_fails_is_said_and_followed_by_others(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scaling, "_TICK_SECONDS", 0.001)
    failing: Any = Failing(fake_cluster(tmp_path, scaling={"enable_scaling": True}))

    nobody: Any = None

    async def body() -> None:
        scaler = Scaler(failing, nobody, nobody)
        scaler.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while failing.looks < 3:
                await asyncio.sleep(0.01)
        await scaler.close()

    asyncio.run(body())
    assert "the number of instances could not be changed" in caplog.text
