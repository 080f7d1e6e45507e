"""What can be followed: an instance's native channel, an engine's own event stream."""

import msgspec

from opal_connector.cluster.curve import CurveClient
from opal_connector.cluster.ingest.states import SourceMetrics, SourceState
from opal_connector.cluster.ingest.vllm_ranks import worker_id_of


class NativeSource(msgspec.Struct, frozen=True):
    """The event channel of an Opal instance, by the endpoint that it answers questions at.

    `curve` is for an instance that wants to know who follows it.
    """

    endpoint: str
    curve: CurveClient | None = None

    @property
    def name(self) -> str:
        """How a feed calls it."""
        return self.endpoint


class VllmSource(msgspec.Struct, frozen=True, kw_only=True):
    """The KV events of a vLLM engine that speaks for itself.

    `worker` is its id in the index; ranks behind the first have it with `/dp` and their number.
    Without `replay_endpoint` a lost batch costs all that was known. `is_bound` is for engines that
    connect to whoever listens: an endpoint without a wildcard on their side. An instance that is
    followed on the native channel needs no such source: its device is in the channel.
    """

    worker: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    model: str = ""
    block_tokens: int | None = None
    rank: int = 0
    is_bound: bool = False

    @property
    def name(self) -> str:
        """How a feed calls it."""
        return worker_id_of(self.worker, self.rank)


Source = NativeSource | VllmSource


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One source now.

    `applied` is the last batch that was taken in, None before there was one; `worker_ids` are those
    that it feeds; `is_settled` says that it is live, waits for nothing and found no difference.
    """

    name: str
    endpoint: str
    is_native: bool
    state: SourceState
    is_settled: bool
    worker_ids: tuple[str, ...]
    applied: int | None
    metrics: SourceMetrics
