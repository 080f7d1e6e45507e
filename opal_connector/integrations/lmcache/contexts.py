"""What the names of objects in a directory refer to, kept in small files beside them."""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from opal_connector.integrations.lmcache.context_names import (
    CONTEXTS_NAME,
    context_file_name,
    is_context_file,
)
from opal_connector.integrations.lmcache.identity import Context, ContextNumber
from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.file_names import namespace_name, new_temporary_name

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_MODE: Final = 0o700
_FILE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RETRY_SECONDS: Final = 1.0
_MOST_TRIES: Final = 20  # to read a file; one that can never be read must not keep a tier closed
_LOOK_SECONDS: Final = 5.0  # between two looks whether the files are still there
_decode = msgspec.json.Decoder(Context).decode


class ContextFiles:
    """The contexts of one directory's objects, one file each, named by what names refer to.

    A thread of its own reads them all at the start and when asked to, and writes new ones: a
    directory that hangs holds up nobody. Should a process end between an object and its context,
    the object is not found again, and is deleted.

    Somebody may empty the directory beside a running server. The tier makes its own anew with the
    next store and goes on, so every few seconds, and at the end, the thread looks whether its files
    are still there, and writes those that are not.

    Mutable state: what is to be written, what was ever wanted, what was read and not taken, and
    whether a reading is due; guarded by `_wake`'s lock, which is not held while the directory is
    asked. `_written`, the files that are there, `_tries`, how often one could not be read, and
    `_next_look` belong to the thread.
    """

    def __init__(
        self, root: Path, namespace: bytes, *, look_seconds: float = _LOOK_SECONDS
    ) -> None:
        self._folder = f"{root}/{namespace_name(namespace)}/{CONTEXTS_NAME}"
        self._root = str(root)
        self._wake = threading.Condition()
        self._wanted: dict[Context, None] = {}
        self._ever_wanted: set[Context] = set()
        self._read: list[Context] = []
        self._readings_due = 1
        self._is_closing = False
        self._written: dict[str, Context] = {}
        self._tries: Counter[str] = Counter()
        self._look_seconds = look_seconds
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="opal-contexts", daemon=True)
        self._thread.start()

    @property
    def is_read(self) -> bool:
        """Whether all that was there, when it was last asked for, has been read."""
        return self._readings_due == 0

    def want(self, contexts: Iterable[Context]) -> None:
        """Have contexts written, if they are not there. Costs little when asked again."""
        with self._wake:
            new = [context for context in contexts if context not in self._ever_wanted]
            if new:
                self._ever_wanted.update(new)
                self._wanted.update(dict.fromkeys(new))
                self._wake.notify()

    def read_again(self) -> None:
        """Look what others have written."""
        with self._wake:
            self._readings_due += 1
            self._wake.notify()

    def take(self) -> list[Context]:
        """What was read since the last call."""
        if not self._read:
            return []
        with self._wake:
            taken, self._read = self._read, []
            return taken

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Write what is wanted, and end; a thread that hangs is left behind."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_seconds)

    # ---- in the thread ----

    def _run(self) -> None:
        has_failed = False
        while True:
            with self._wake:
                is_due = self._readings_due or self._wanted
                if (not is_due or has_failed) and not self._is_closing:
                    self._wake.wait(_RETRY_SECONDS if is_due else self._look_seconds)
                is_closing = self._is_closing
            steps = (partial(self._look, is_last=is_closing), self._read_due, self._write_wanted)
            ended = [self._is_done(step) for step in steps]
            has_failed = not all(ended)
            if is_closing:
                return

    def _is_done(self, step: Callable[[], None]) -> bool:
        """Take one step, which another one's failure does not keep from being taken."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - tried again; the objects are only not found again
            warnings.warn("contexts", "cannot use %s: %r", self._folder, error)
            return False
        return True

    def _look(self, *, is_last: bool) -> None:
        """Want again what is gone, unless the tier's directory is too: then no names are there."""
        now = time.monotonic()
        if not self._written or not (is_last or now >= self._next_look):
            return
        self._next_look = now + self._look_seconds
        if not os.path.isdir(os.path.dirname(self._folder)):
            return
        try:
            present = set(os.listdir(self._folder))
        except FileNotFoundError:
            present = set()
        gone = [name for name in self._written if name not in present]
        if gone:
            warnings.warn("gone", "%d files in %s were removed", len(gone), self._folder)
        with self._wake:
            self._wanted.update((self._written.pop(name), None) for name in gone)

    def _read_due(self) -> None:
        with self._wake:
            due = self._readings_due
        if not due:
            return
        found, fault = self._read_all()
        with self._wake:
            self._read += found
            self._readings_due -= due if fault is None else 0
        if fault is not None:
            raise fault

    def _write_wanted(self) -> None:
        with self._wake:
            wanted = list(self._wanted)
        for context in wanted:
            self._write(context)
            with self._wake:
                self._wanted.pop(context, None)

    def _read_all(self) -> tuple[list[Context], OSError | None]:
        """What was not known yet, and why a file could not be read that may be read later."""
        found: list[Context] = []
        fault: OSError | None = None
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return [], None
        for name in names:
            if not is_context_file(name) or name in self._written:
                continue
            try:
                context = _decode(Path(self._folder, name).read_bytes())
            except (msgspec.DecodeError, FileNotFoundError):
                continue  # torn by a crash: the next store writes it again
            except OSError as error:
                self._tries[name] += 1
                if self._tries[name] < _MOST_TRIES:
                    fault = error  # its objects would be taken for nobody's
                continue
            if _file_name(context) == name:
                found.append(context)
                self._written[name] = context
        return found, fault

    def _write(self, context: Context) -> None:
        name = _file_name(context)
        if name in self._written:
            return
        for folder in (os.path.dirname(self._folder), self._folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, _MODE)
        temporary = f"{self._folder}/{new_temporary_name()}"
        try:
            file = os.open(temporary, _FILE_FLAGS, 0o600)
            with open(file, "wb") as stream:
                stream.write(msgspec.json.encode(context))
            os.rename(temporary, f"{self._folder}/{name}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._written[name] = context


def _file_name(context: Context) -> str:
    return context_file_name(ContextNumber(context).short)
