"""`opal bench` as a library: workloads here, `run` in `driver`, figures in `summary`.

    result = await run(Sessions(num_users=8), Target(url="http://127.0.0.1:8000"))

Nothing here imports aiohttp; `driver` and `client` do.
"""

from opal_connector.cli.bench.result import BenchResult, RequestRecord
from opal_connector.cli.bench.sessions import Sessions
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
    "RequestRecord",
    "Sessions",
    "Turn",
    "Vocabulary",
    "Workload",
    "WorkloadError",
]
