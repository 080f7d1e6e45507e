"""What workers are about to have: the prompts under way, before any event says so."""

from collections import Counter, deque
from collections.abc import Sequence

from opal_connector.cluster.index import DEVICE_COLUMN, PrefixIndex
from opal_connector.cluster.worker_names import WorkerNames
from opal_connector.keys import CHAIN_ROOT


class Predictions:
    """The blocks of prompts that were sent to workers and are not announced yet.

    They are expected from when a prompt is sent until `grace_seconds` after its end, by which time
    the worker's own events say what it has. They are kept apart from facts: a prediction that does
    not come true leaves no trace. Mutable state: the index, how many prompts expect each block, and
    what is to be forgotten when; used by one thread.
    """

    def __init__(self, *, grace_seconds: float = 2.0, max_blocks: int = 1_000_000) -> None:
        self._grace_seconds = grace_seconds
        self._max_blocks = max_blocks
        self._index = PrefixIndex()
        self._expected: dict[int, Counter[bytes]] = {}
        self._under_way: dict[str, tuple[int, list[bytes]]] = {}
        self._ended: deque[tuple[float, int, list[bytes]]] = deque()

    def __len__(self) -> int:
        return self._index.block_count

    def expect(self, request_id: str, bit: int, hashes: Sequence[bytes]) -> None:
        """A prompt is sent to the worker of a bit. What would be too much is not expected."""
        if not hashes or request_id in self._under_way:
            return
        if len(self) + len(hashes) > self._max_blocks:
            return
        blocks = list(hashes)
        self._under_way[request_id] = (bit, blocks)
        self._expected.setdefault(bit, Counter()).update(blocks)
        self._index.insert(DEVICE_COLUMN, bit, CHAIN_ROOT, blocks)

    def end(self, request_id: str, now: float, *, is_computed: bool) -> None:
        """A request is over; one that was not computed is not expected any more at once."""
        bit, blocks = self._under_way.pop(request_id, (0, []))
        if not blocks:
            return
        if is_computed:
            self._ended.append((now + self._grace_seconds, bit, blocks))
        else:
            self._forget(bit, blocks)

    def expire(self, now: float) -> None:
        """Forget what should have been announced by now."""
        while self._ended and self._ended[0][0] <= now:
            _, bit, blocks = self._ended.popleft()
            self._forget(bit, blocks)

    def remove_worker(self, bit: int) -> None:
        """A worker is gone."""
        self._index.clear(DEVICE_COLUMN, bit)
        self._expected.pop(bit, None)
        self._ended = deque(entry for entry in self._ended if entry[1] != bit)
        for request_id in [name for name, entry in self._under_way.items() if entry[0] == bit]:
            del self._under_way[request_id]

    def depths(self, hashes: Sequence[bytes], workers: int, names: WorkerNames) -> dict[str, int]:
        """Per worker the blocks from the start of a sequence that it is about to have."""
        return self._index.depths(hashes, workers, names)

    def _forget(self, bit: int, blocks: list[bytes]) -> None:
        expected = self._expected[bit]
        gone: list[bytes] = []
        for block_hash in blocks:
            if expected[block_hash] > 1:
                expected[block_hash] -= 1
            else:
                del expected[block_hash]
                gone.append(block_hash)
        if gone:
            self._index.delete(DEVICE_COLUMN, bit, gone)
        if not expected:
            del self._expected[bit]
