"""What runs in the process: `python -m opal_connector.mooncake_helper SOCKET`.

It ends when the process that started it closes the socket, or ends.
"""

import ctypes
import importlib
import mmap
import os
import socket
import sys
import threading
from typing import Any, Final

from opal_connector.mooncake_helper.calls import Memories, StoreCalls
from opal_connector.mooncake_helper.messages import (
    BROKEN,
    AddChannel,
    AddMemory,
    Answer,
    RemoveMemory,
    Setup,
    receive_request,
    send,
)

_FAREWELL_SECONDS: Final = 1.5
# With two threads on two cores this is 1.6 times the bytes a second. More of it costs more than it
# gives where all cores are busy with other work.
_CALLS_NICER: Final = 7
_NO_METADATA_SERVER: Final = "P2PHANDSHAKE"


def main() -> None:
    """Serve the calls of the process at the other end of the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    library, trouble = _load()
    try:
        request, _ = receive_request(control)
        if library is None or not isinstance(request, Setup):
            send(control, Answer([BROKEN], trouble))
            raise EOFError(trouble)
        store, calls, memories = _connect(control, library, request)
        _Control(control, store, calls, memories).serve()
    except (EOFError, OSError):
        os._exit(0)
    if request.segment_bytes or request.metadata != _NO_METADATA_SERVER:
        # Somebody remembers us. To tell him asks the network: it has a moment for that.
        farewell = threading.Timer(_FAREWELL_SECONDS, os._exit, (0,))
        farewell.daemon = True
        farewell.start()
        store.close()
    os._exit(0)


def _load() -> tuple[Any, str]:
    """The library, or why there is none."""
    try:
        return importlib.import_module("mooncake.store"), ""
    except ImportError as error:
        hint = " (it is in Debian's libibverbs1)" if "libibverbs" in str(error) else ""
        return None, f"Mooncake's library cannot be loaded: {error}{hint}"


def _connect(
    control: socket.socket, library: Any, setup: Setup
) -> tuple[Any, StoreCalls, Memories]:
    store, config = library.MooncakeDistributedStore(), library.ReplicateConfig()
    config.replica_num = setup.replicas
    code = store.setup(
        setup.local_host,
        setup.metadata,
        setup.segment_bytes,
        setup.buffer_bytes,
        setup.protocol,
        setup.device,
        setup.master,
    )
    send(control, Answer([code]))
    if code != 0:
        raise EOFError("the store cannot be reached")
    memories = Memories()
    return store, StoreCalls(store, config, memories), memories


class _Control:
    """What is said besides calls: memory, and sockets for calls.

    Mutable state: `_mapped`, so that mappings live; used by one thread.
    """

    def __init__(
        self, control: socket.socket, store: Any, calls: StoreCalls, memories: Memories
    ) -> None:
        self._control = control
        self._store = store
        self._calls = calls
        self._memories = memories
        self._mapped: dict[int, mmap.mmap] = {}

    def serve(self) -> None:
        """Until the other side is gone."""
        while True:
            try:
                request, file = receive_request(self._control)
            except EOFError:
                return
            if isinstance(request, RemoveMemory):
                send(self._control, Answer([self._remove_memory(request.memory)]))
            elif file is None:
                raise OSError("a file should have come along")
            elif isinstance(request, AddMemory):
                send(self._control, Answer([self._add_memory(request, file)]))
            elif isinstance(request, AddChannel):
                channel = socket.socket(fileno=file)
                threading.Thread(target=self._serve_calls, args=(channel,), daemon=True).start()
                send(self._control, Answer([0]))

    def _add_memory(self, request: AddMemory, file: int) -> int:
        try:
            mapped = mmap.mmap(file, request.size_bytes)
        except (OSError, ValueError):
            return BROKEN
        finally:
            os.close(file)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        code: int = self._store.register_buffer(address, request.size_bytes)
        if code == 0:
            self._mapped[request.memory] = mapped
            self._memories.add(request.memory, address)
        return code

    def _remove_memory(self, memory: int) -> int:
        mapped = self._mapped.pop(memory)
        code: int = self._store.unregister_buffer(self._memories.remove(memory))
        mapped.close()
        return code

    def _serve_calls(self, channel: socket.socket) -> None:
        _give_way()
        with channel:
            while True:
                try:
                    request, _ = receive_request(channel)
                    if isinstance(request, Setup | AddMemory | RemoveMemory | AddChannel):
                        return
                    send(channel, self._calls.carry_out(request))
                except (EOFError, OSError):
                    return


def _give_way() -> None:
    """Let the threads that move bytes go before this one.

    The library waits for a transfer by asking for its state without a pause. Where cores are few
    that takes them from the threads that the transfer needs, here, in the peer and in the engine.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _CALLS_NICER)


if __name__ == "__main__":
    main()
