"""`ObjectStoreClient`: values as objects in a bucket of S3, Google Cloud Storage or Azure."""

import asyncio
import contextlib
import errno
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Buffer, override

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import EngineClient, Listed, Span
from opal_connector.tiers.engines.loop_thread import LoopThread, map_bounded
from opal_connector.tiers.engines.object_store_errors import as_os_error, is_beyond_end, no_bucket
from opal_connector.tiers.engines.object_store_late import LatePuts
from opal_connector.tiers.engines.object_store_ranges import Destination, Pace, ranges_of
from opal_connector.tiers.engines.object_store_settings import make_store
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError
from opal_connector.tiers.header_scan import batches

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

PART_BYTES: Final = 8 << 20
CONCURRENCY: Final = 16
_MULTIPART_PARTS: Final = 4  # three more requests are worth it from so many parts on
_HEADS_AT_ONCE: Final = 64
_PAGE: Final = 1000  # what all stores tell with one request, and S3 removes with one
_PAGE_COST: Final = 4  # a page takes about as long as so many rounds of HEADs
Result = TypeVar("Result")


class ObjectStoreClient(EngineClient):
    """Values as objects under a URL: `s3://bucket/prefix`, `gs://...` or `az://...`.

    A call that is one request is made in the caller's thread, and its library bounds it; others
    have all their requests under way in a thread of this client, and one deadline. Only
    `list_values` and `remove_under` take longer than the timeout, which holds for each of their
    pages.

    A PUT without an answer may be carried out after the DELETE that is to take it back: such a key
    is removed twice, with a pause between.

    Mutable state: PUTs without an answer, behind a lock of their own; whether the bucket was seen,
    how many values a prefix had when it was last listed, and how fast requests are: hints, written
    whole by any thread.
    """

    can_list: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, str] | None = None,
        timeout_seconds: float,
        part_bytes: int = PART_BYTES,
        concurrency: int = CONCURRENCY,
    ) -> None:
        """Make a client; nothing is connected to.

        Raises:
            ConfigError: `obstore` is not installed, or an option is not one of its options.
        """
        self._store = make_store(url, options or {}, timeout_seconds)
        import obstore  # is there: the store was made

        self._obstore = obstore
        split = urlsplit(url)
        self._place = f"{split.scheme}://{split.netloc.rpartition('@')[2]}"
        self._removes_in_batches = split.scheme in ("s3", "s3a")
        self._timeout_seconds = timeout_seconds
        self._part_bytes = part_bytes
        self._concurrency = concurrency
        self._pace = Pace(part_bytes)
        self._loop = LoopThread("opal-object-store")
        self._late = LatePuts(timeout_seconds)
        self._is_bucket_seen = False
        self._listed_counts: dict[str, int] = {}

    @override
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        views = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
        try:
            with self._faults(missing_is_bucket=True):
                if sum(view.nbytes for view in views) < _MULTIPART_PARTS * self._part_bytes:
                    self._obstore.put(self._store, key, views or b"", use_multipart=False)
                else:
                    self._run(lambda: self._put_in_parts(key, views))
        except (ConnectionError, NoSpaceError, PermissionError):
            raise  # nothing was sent, or it was refused
        except OSError:
            self._late.add(key)
            raise
        self._is_bucket_seen = True

    @override
    def get(self, key: str, size_bytes: int, spans: Sequence[Span]) -> None:
        into = Destination(spans)
        wanted = ((span.offset, span.offset + span.size_bytes) for span in spans)
        ranges = ranges_of(wanted, self._pace.part_bytes)
        with self._faults_of_get(key, size_bytes):
            if len(ranges) == 1:
                into.fill(*ranges[0], self._get_range(key, ranges[0], size_bytes))
            elif ranges:
                self._run(lambda: self._get_ranges(key, ranges, size_bytes, into))

    @override
    def lend(
        self, key: str, size_bytes: int, wanted: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        ranges = ranges_of(wanted, self._pace.part_bytes)
        if len(ranges) != 1 or ranges[0][0] != 0:
            return None  # what comes in several pieces is put together where it belongs
        with self._faults_of_get(key, size_bytes):
            data = memoryview(self._get_range(key, ranges[0], size_bytes))
        if data.nbytes != ranges[0][1]:
            raise ChecksumMismatchError(f"a range of {ranges[0][1]} bytes has {data.nbytes}")
        return data

    @override
    def get_start(self, key: str, size_bytes: int) -> bytes:
        with self._faults():
            try:
                found = self._obstore.get(self._store, key, options={"range": (0, size_bytes)})
                return bytes(found.bytes())
            except Exception as error:
                if not is_beyond_end(error):
                    raise
                return b""  # no byte of an empty value can be asked for

    @override
    def get_starts(self, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        async def one(key: str) -> bytes | None:
            return await self._start(key, size_bytes)

        with self._faults():
            return self._run(lambda: map_bounded(one, keys, _HEADS_AT_ONCE))

    @override
    def present(self, keys: Sequence[str]) -> list[bool]:
        with self._faults():
            if len(keys) == 1:
                found = [self._is_present(keys[0])]
            else:
                found = self._run(lambda: self._are_present(keys))
            if any(found):
                self._is_bucket_seen = True
            elif keys and not self._is_bucket_seen:
                # A HEAD says of a bucket that is not there what it says of a value: not found.
                next(iter(self._obstore.list(self._store, chunk_size=1)), None)
                self._is_bucket_seen = True
        return found

    @override
    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            with self._faults():
                self._run(lambda: self._remove(keys))

    @override
    def remove_under(self, prefix: str) -> None:
        for page in self.list_values(prefix):
            self.remove([value.key for value in page])
        self.remove(self._late.under(prefix))  # those that have not come yet

    @override
    def list_values(self, prefix: str) -> Iterator[Sequence[Listed]]:
        count = 0
        with self._faults(missing_is_bucket=True):
            pages = iter(self._obstore.list(self._store, prefix.rstrip("/"), chunk_size=_PAGE))
        while True:
            with self._faults(missing_is_bucket=True):
                page = next(pages, None)
            if page is None:
                break
            count += len(page)
            yield [
                Listed(value["path"], value["size"], value["last_modified"].timestamp())
                for value in page
            ]
        self._is_bucket_seen = True
        self._listed_counts[prefix] = count

    @override
    def close(self) -> None:
        self._loop.close()

    # ---- inside ----

    def _run(self, make: Callable[[], Awaitable[Result]]) -> Result:
        return self._loop.run(make, self._timeout_seconds)

    @contextlib.contextmanager
    def _faults(self, *, missing_is_bucket: bool = False) -> Generator[None]:
        """Turns what the library raises into an `OSError`."""
        try:
            yield
        except (ChecksumMismatchError, ObjectGoneError):
            raise
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._place} does not answer in time") from error
        except Exception as error:
            fault = as_os_error(error, self._place)
            if missing_is_bucket and isinstance(fault, ObjectGoneError):
                fault = no_bucket(self._place)
            raise fault from error

    @contextlib.contextmanager
    def _faults_of_get(self, key: str, size_bytes: int) -> Generator[None]:
        """Turns what the library raises into an `OSError`, and a value that is too short."""
        with self._faults():
            try:
                yield
            except Exception as error:
                if not is_beyond_end(error):
                    raise
                raise ChecksumMismatchError(f"{key} has less than {size_bytes} bytes") from None

    async def _put_in_parts(self, key: str, views: Sequence[memoryview]) -> None:
        await self._obstore.put_async(
            self._store,
            key,
            views,
            use_multipart=True,
            chunk_size=self._part_bytes,
            max_concurrency=self._concurrency,
        )

    def _get_range(self, key: str, wanted: tuple[int, int], size_bytes: int) -> Buffer:
        began = time.perf_counter()
        options = _range_option(wanted, size_bytes)
        found = self._obstore.get(self._store, key, options=options)
        _check_size(key, found, size_bytes)
        data = found.bytes()
        self._pace.note(len(data), time.perf_counter() - began)
        return data

    async def _get_ranges(
        self,
        key: str,
        ranges: Sequence[tuple[int, int]],
        size_bytes: int,
        into: Destination,
    ) -> None:
        async def one(wanted: tuple[int, int]) -> None:
            began = time.perf_counter()
            options = _range_option(wanted, size_bytes)
            found = await self._obstore.get_async(self._store, key, options=options)
            _check_size(key, found, size_bytes)
            data = await found.bytes_async()
            self._pace.note(len(data), time.perf_counter() - began)
            into.fill(*wanted, data)

        await map_bounded(one, ranges, self._concurrency)

    async def _start(self, key: str, size_bytes: int) -> bytes | None:
        options: GetOptions = {"range": (0, size_bytes)}
        try:
            found = await self._obstore.get_async(self._store, key, options=options)
            return bytes(await found.bytes_async())
        except Exception as error:
            if is_beyond_end(error):
                return b""
            # A bucket that is not there is no miss, though the library calls both the same.
            if isinstance(as_os_error(error, self._place), ObjectGoneError):
                return None
            raise

    def _is_present(self, key: str) -> bool:
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        return True

    async def _head(self, key: str) -> bool:
        try:
            await self._obstore.head_async(self._store, key)
        except FileNotFoundError:
            return False
        return True

    async def _are_present(self, keys: Sequence[str]) -> list[bool]:
        """By reading all names, where few pages of them stand against many HEADs; else by HEADs."""
        prefixes = set(map(_prefix_of, keys))
        pages_max = len(keys) // _HEADS_AT_ONCE // _PAGE_COST
        if len(prefixes) == 1 and pages_max:
            listed = await self._listed_keys(prefixes.pop(), pages_max)
            if listed is not None:
                return [key in listed for key in keys]
        return await map_bounded(self._head, keys, _HEADS_AT_ONCE)

    async def _listed_keys(self, prefix: str, pages_max: int) -> set[str] | None:
        """All keys under a prefix, or None where they do not fit so many pages."""
        if self._listed_counts.get(prefix, 0) > pages_max * _PAGE:
            return None
        keys: set[str] = set()
        pages = self._obstore.list(self._store, prefix.rstrip("/"), chunk_size=_PAGE)
        async for page in pages:
            keys.update(value["path"] for value in page)
            if len(keys) > pages_max * _PAGE:
                self._listed_counts[prefix] = len(keys)
                return None
        self._listed_counts[prefix] = len(keys)
        return keys

    async def _remove(self, keys: Sequence[str]) -> None:
        await self._remove_once(keys)
        if late := self._late.among(keys):
            if pause_seconds := self._late.seconds_to_wait():
                await asyncio.sleep(pause_seconds)
                await self._remove_once(list(late))
            self._late.forget(late)

    async def _remove_once(self, keys: Sequence[str]) -> None:
        if self._removes_in_batches:
            pages = batches(dict.fromkeys(keys), _PAGE)
            await map_bounded(self._remove_batch, pages, self._concurrency)
        else:
            await map_bounded(self._remove_one, dict.fromkeys(keys), self._concurrency)

    async def _remove_batch(self, keys: Sequence[str]) -> None:
        await self._obstore.delete_async(self._store, keys)

    async def _remove_one(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._obstore.delete_async(self._store, key)


def _prefix_of(key: str) -> str:
    return key[: key.rindex("/") + 1] if "/" in key else ""


def _range_option(wanted: tuple[int, int], size_bytes: int) -> "GetOptions | None":
    """A range, and none for a whole value: some servers read a whole one faster."""
    return None if wanted == (0, size_bytes) else {"range": wanted}


def _check_size(key: str, found: "GetResult", size_bytes: int) -> None:
    """Before the bytes come: a value of another size is another value."""
    size = found.meta["size"]
    if size != size_bytes:
        raise ChecksumMismatchError(f"{key} has {size} bytes, not {size_bytes}")
