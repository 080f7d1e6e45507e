"""`BorrowedTier`: one rank reads the files that another one stores, and changes none of them."""

import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import stamp

from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers import (
    BorrowedTier,
    ChecksumMismatchError,
    DistributedFS,
    FileTier,
    LocalNVMe,
    allocate_host_rows,
    borrowed_tier,
)
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.file_names import object_key, object_path
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
ROW_BYTES = 4096
NAME = ObjectName(0, CHAIN_ROOT, stamp(1) + stamp(2))
ROWS = np.random.default_rng(5).integers(0, 256, (2, ROW_BYTES), dtype=np.uint8)


class Pair:
    """Who stores and who reads, over one directory, with a note between them."""

    def __init__(self, root: Path, kind: type[LocalNVMe] | type[DistributedFS]) -> None:
        self.note = SimpleNamespace(slot=-1)
        self.holder = self._make(root, kind)
        self.reader = BorrowedTier(self._make(root, kind), self.note if kind is LocalNVMe else None)

    def _make(self, root: Path, kind: type[LocalNVMe] | type[DistributedFS]) -> FileTier:
        if kind is LocalNVMe:
            return LocalNVMe(root, row_bytes=ROW_BYTES, rank=0, slot_note=self.note)
        return DistributedFS(root, row_bytes=ROW_BYTES, rank=0)

    def open(self) -> None:
        list(self.holder.open(NAMESPACE))
        assert list(self.reader.open(NAMESPACE)) == []

    def store(self) -> None:
        checks = [row_check(ROWS[row], NAME.run, row) for row in (0, 1)]
        self.holder.write_object(NAME, ROWS, (0, 1), checks)

    def read(self) -> np.ndarray:
        into = allocate_host_rows(row_count=2, row_bytes=ROW_BYTES)
        self.reader.read_object(NAME, (0, 1), into, (1, 0))
        return into[::-1]

    def close(self) -> None:
        self.reader.close()
        self.holder.close()


@pytest.fixture(params=[LocalNVMe, DistributedFS])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(tmp_path, request.param)


def test_what_the_other_rank_stores_is_read(pair: Pair) -> None:
    """The bytes are checked as in any tier, and a miss is a miss."""
    pair.open()
    with pytest.raises(ObjectGoneError):
        pair.read()
    pair.store()
    assert np.array_equal(pair.read(), ROWS)

    path = Path(object_path(str(pair.holder.directory), object_key(NAME)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatchError):
        pair.read()
    pair.close()


def test_nothing_is_ever_changed_by_the_reader(pair: Pair, tmp_path: Path) -> None:
    """A write, a removal or a wipe that comes its way is an error and leaves all as it is."""
    pair.open()
    pair.store()
    before = sorted(tmp_path.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: pair.reader.write_object(NAME, ROWS, (0, 1), (0, 0)),
        lambda: pair.reader.remove_object(NAME),
        pair.reader.wipe,
    ]
    for call in calls:
        with pytest.raises(OSError, match="another rank stores"):
            call()
    pair.reader.touch([object_key(NAME)])
    pair.reader.probe()

    assert pair.reader.foreign_bytes == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert np.array_equal(pair.read(), ROWS)
    pair.close()


def test_reader_waits_for_the_directory_and_follows_it(tmp_path: Path) -> None:
    """On a local disk the other rank says which slot it got, and may have to take another one."""
    first = LocalNVMe(tmp_path, row_bytes=ROW_BYTES, rank=0)
    list(first.open(NAMESPACE))  # some other engine has slot 0
    pair = Pair(tmp_path, LocalNVMe)
    opened = threading.Event()

    def open_reader() -> None:
        list(pair.reader.open(NAMESPACE))
        opened.set()

    thread = threading.Thread(target=open_reader, daemon=True)
    thread.start()
    assert not opened.is_set()
    list(pair.holder.open(NAMESPACE))
    assert opened.wait(20)
    assert pair.note.slot == 1
    pair.store()
    assert np.array_equal(pair.read(), ROWS)

    first.close()
    pair.holder.close()
    list(pair.holder.open(NAMESPACE))  # again, and slot 0 is free now
    assert pair.note.slot == 0
    with pytest.raises(ObjectGoneError):
        pair.read()
    pair.store()
    assert np.array_equal(pair.read(), ROWS)
    pair.close()


def test_reader_gives_up_where_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of the tier, which is then tried again, and hangs nobody."""
    monkeypatch.setattr(borrowed_tier, "_PATIENCE_SECONDS", 0.05)
    pair = Pair(tmp_path, LocalNVMe)

    with pytest.raises(TimeoutError, match="has not opened its tier"):
        list(pair.reader.open(NAMESPACE))
    with pytest.raises(OSError, match="no process has taken rank 0"):
        pair.reader.attach(NAMESPACE)
    pair.close()
