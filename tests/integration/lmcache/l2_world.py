"""An adapter with real tiers, and LMCache's side of it: keys, buffers, and waiting for results."""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from opal_connector.integrations.lmcache.l2_adapter import OpalL2Adapter

torch.set_num_threads(1)  # the buffers are small, and a pool of threads only competes with ours
PATIENCE_SECONDS = 30.0
SIZE = 64 << 10  # one row
Params = dict[str, Any]
NO_LAYOUT = MemoryLayoutDesc(shapes=[], dtypes=[])


def key_of(number: int, *, model: str = "model", rank: int = 0, salt: str = "") -> ObjectKey:
    """The key of a chunk."""
    return ObjectKey(number.to_bytes(32, "big"), model, rank, 0, salt)


def buffer_of(
    size_bytes: int, fill: int = 0, *, dtype: torch.dtype = torch.float16
) -> TensorMemoryObj:
    """A memory object of LMCache's, with bytes that tell where they belong."""
    pattern = torch.arange(size_bytes, dtype=torch.int64) * 31 + fill * 7 + (fill != 0)
    raw = (pattern % 251 if fill else pattern * 0).to(torch.uint8)
    shape = torch.Size([2, size_bytes // dtype.itemsize // 2])
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=size_bytes,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, metadata, parent_allocator=None)


def layout_of(item: TensorMemoryObj) -> dict[int, MemoryLayoutDesc]:
    """What a lookup says about an object that looks like this."""
    return {0: MemoryLayoutDesc(item.get_shapes(), item.get_dtypes())}


class Told(L2AdapterListener):
    """What LMCache was told, in order."""

    def __init__(self) -> None:
        self.there: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []
        self.wrong: list[str] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            if key in self.there:
                self.wrong.append(f"stored twice: {key}")
            self.there[key] = size

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            if self.there.pop(key, None) is None:
                self.wrong.append(f"deleted and not there: {key}")


def wait_for(descriptor: int) -> None:
    """Until a descriptor says that something has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE_SECONDS * 1000), "nothing has ended in time"
    consume_fd(descriptor)


def until(
    condition: Callable[[], Any],
    what: str,
    patience_seconds: float = PATIENCE_SECONDS,
    pause_milliseconds: int = 10,
) -> None:
    """Wait for a condition, at most for so long. Conditions that cost something want a pause."""
    pause = select.poll()
    give_up_at = time.monotonic() + patience_seconds
    while time.monotonic() < give_up_at:
        if condition():
            return
        pause.poll(pause_milliseconds)
    raise AssertionError(f"not in time: {what}")


class Host:
    """LMCache's controllers, for one adapter: every call waits for its result."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.adapter = OpalL2Adapter(params)
        self.told = Told()
        self.adapter.register_listener(self.told)

    @property
    def books(self) -> Any:
        return self.adapter._runtime.books

    def store(self, keys: Sequence[ObjectKey], items: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), list(items))
        results: dict[int, Any] = {}
        while task not in results:
            wait_for(self.adapter.get_store_event_fd())
            results.update(self.adapter.pop_completed_store_tasks())
        return results[task]

    def look_up(
        self, keys: Sequence[ObjectKey], layouts: dict[int, MemoryLayoutDesc] | None = None
    ) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), layouts or {0: NO_LAYOUT})
        while (bitmap := self.adapter.query_lookup_and_lock_result(task)) is None:
            wait_for(self.adapter.get_lookup_and_lock_event_fd())
        return [bitmap.test(position) for position in range(len(keys))]

    def load(self, keys: Sequence[ObjectKey], items: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(items))
        while (bitmap := self.adapter.query_load_result(task)) is None:
            wait_for(self.adapter.get_load_event_fd())
        return [bitmap.test(position) for position in range(len(keys))]

    def settle(self) -> None:
        """Until nothing is in motion between the tiers and nothing is due."""
        until(
            lambda: not (len(self.books.jobs) or self.books.wants_upkeep),
            "the tiers are at rest",
        )
        self.books.check()

    def tier(self, name: str) -> Any:
        return self.books.storage.tiers[self.books.tier_names.index(name)]

    def close(self) -> None:
        self.adapter.close()
        assert not self.told.wrong, self.told.wrong


def tiers_of(
    directory: Path | None, *, memory: str | None = "1MiB", disk: str = "16MiB", **others: Any
) -> dict[str, Any]:
    """Settings for small tiers: memory, and a directory if there is one."""
    names = (["CPUMemory"] if memory else []) + (["LocalNVMe"] if directory else [])
    params: dict[str, Any] = {"kvc_tiers": names, **others}
    if memory:
        params["CPUMemory"] = {"capacity_GB": memory, **others.get("CPUMemory", {})}
    if directory:
        nvme = {"path": str(directory), "capacity_GB": disk, "reserve_GB": 0}
        params["LocalNVMe"] = {**nvme, **others.get("LocalNVMe", {})}
    return params


@contextlib.contextmanager
def hosted(params: Params) -> Iterator[Host]:
    """An adapter with LMCache's side of it; its books are audited at the end."""
    host = Host(params)
    try:
        yield host
        host.settle()
    finally:
        host.close()


def assert_told_exactly(host: Host) -> None:
    """LMCache believes what the adapter lists, and its listing is what the books hold."""
    listed = {
        bytes.fromhex(entry.key.chunk_hash_hex): entry.size_bytes
        for entry in host.adapter.list_l2_keys(page_size=10_000).entries
    }
    assert {key.chunk_hash: size for key, size in host.told.there.items()} == listed


def loads_what_was_stored(host: Host, number: int, size_bytes: int, **key: Any) -> bool:
    """Whether a key gives back the bytes that belong to it; a buffer that does not is an error."""
    target = buffer_of(size_bytes)
    [is_loaded] = host.load([key_of(number, **key)], [target])
    if is_loaded:
        assert torch.equal(target.raw_data, buffer_of(size_bytes, number + 1).raw_data)
    return is_loaded


def store_some(host: Host, numbers: range, size_bytes: int = SIZE, **key: Any) -> list[bool]:
    """Store objects one by one; whether each is there."""
    return [
        host.store([key_of(n, **key)], [buffer_of(size_bytes, n + 1)]).is_successful()
        for n in numbers
    ]


class Gate:
    """The rule of a disk that stands still until it is let go."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, call: str, path: str) -> None:
        if call in self.calls and "contexts" not in path:
            self.reached.set()
            self.open.wait(60)
