"""`opal bench` as a library: workloads here, `run` in `driver`, figures in `summary`.

    result = await run(Sessions(num_users=8), Target(url="http://127.0.0.1:8000"))

Nothing here imports aiohttp; `driver` and `client` do.
"""

from opal_connector.cli.bench.otel import OtelWorkload
from opal_connector.cli.bench.rag import RAGWorkload
from opal_connector.cli.bench.rates import ExponentialReqRate, UniformReqRate
from opal_connector.cli.bench.result import BenchResult, RequestRecord
from opal_connector.cli.bench.sc25 import SC25Workload
from opal_connector.cli.bench.sessions import Sessions
from opal_connector.cli.bench.traces import TraceWorkload
from opal_connector.cli.bench.workload import (
    Conversation,
    Turn,
    Vocabulary,
    Workload,
    WorkloadError,
)

__all__ = [
    "BenchResult",
    "Conversation",
    "ExponentialReqRate",
    "OtelWorkload",
    "RAGWorkload",
    "RequestRecord",
    "SC25Workload",
    "Sessions",
    "TraceWorkload",
    "Turn",
    "UniformReqRate",
    "Vocabulary",
    "Workload",
    "WorkloadError",
]
