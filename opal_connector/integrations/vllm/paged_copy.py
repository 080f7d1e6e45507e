"""Copies between vLLM's paged KV blocks and the rows of a tier, whole blocks only.

On a CPU the layout inside a block is the kernel's own (keys lie transposed), so a block is opaque:
its bytes are moved and never interpreted.

A block is named by a flat address: `kv group * blocks of the engine + block id`. The kv groups'
blocks lie over each other in one memory, but no block is of two groups at a time.
"""

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from opal_connector.integrations.vllm.layout import BlockView
from opal_connector.tiers import PagedBlocks
from opal_connector.tiers.base import Rows

_BATCH_BYTES = 8 << 20
_MOST_BLOCKS = 64  # bounds how long one call runs


GroupViews = Mapping[int, Sequence[BlockView]]  # by the engine's own number of the kv group


def paged_blocks(groups: GroupViews, block_count: int) -> PagedBlocks:
    """The copier for the device that the tensors are on, of kv groups that have any."""
    device = next(view.tensor.device for views in groups.values() for view in views)
    if device.type == "cpu":
        return HostPagedBlocks(groups, block_count)
    return DevicePagedBlocks(groups, block_count)


class _Addresses:
    """Where one kv group's addresses end and the next one's begin. Stateless."""

    def __init__(self, groups: GroupViews, block_count: int) -> None:
        self._block_count = block_count
        self._only = next(iter(groups)) if len(groups) == 1 else None
        self.row_bytes = max(_block_bytes(views) for views in groups.values())

    def runs(
        self, addresses: Sequence[int], first: int, last: int
    ) -> list[tuple[int, int, int, int]]:
        """Positions `[first, last)` as runs of a kv group: `(begin, end, kv group, its base)`."""
        if self._only is not None:
            return [(first, last, self._only, self._only * self._block_count)]
        found = []
        begin = first
        while begin < last:
            kv_group = addresses[begin] // self._block_count
            base = kv_group * self._block_count
            stop = base + self._block_count
            end = begin + 1
            while end < last and base <= addresses[end] < stop:
                end += 1
            found.append((begin, end, kv_group, base))
            begin = end
        return found


def _readable_tensor(rows: Rows) -> torch.Tensor:
    """Rows as a tensor that is only read: `torch` warns of memory that may not be written to."""
    if rows.flags.writeable:
        return torch.from_numpy(rows)
    address, _ = rows.__array_interface__["data"]
    described = {**rows.__array_interface__, "data": (address, False)}
    lasting = SimpleNamespace(__array_interface__=described, rows=rows)  # as long as the tensor
    return torch.from_numpy(np.asarray(lasting))


def _block_bytes(views: Sequence[BlockView]) -> int:
    return sum(view.block_bytes for view in views)


class HostPagedBlocks:
    """Paged blocks in host memory, moved by strided numpy copies without the GIL.

    Few and large copies: a copy is fast, getting the GIL back from a busy engine loop after each
    one is not. But not larger than what a cache level holds, because the rows are hashed right
    after (or before) they are copied. Holds the tensors; has no other state.
    """

    def __init__(self, groups: GroupViews, block_count: int) -> None:
        self._tensors = [view.tensor for views in groups.values() for view in views]
        self._addresses = _Addresses(groups, block_count)
        self.row_bytes = self._addresses.row_bytes
        self.batch_blocks = min(_MOST_BLOCKS, max(2, _BATCH_BYTES // self.row_bytes))
        self._parts = {
            kv_group: _host_parts(views, block_count) for kv_group, views in groups.items()
        }
        self._filled = {kv_group: _block_bytes(views) for kv_group, views in groups.items()}

    def ready_mark(self) -> object:
        """None: when a job is submitted, the host has finished the forward pass."""
        return None

    def gather(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy blocks to rows: one copy per run of evenly spaced blocks and adjacent rows."""
        del after
        for first, last, row in row_runs(tier_rows):
            for begin, end, kv_group, base in self._addresses.runs(block_ids, first, last):
                target = rows[row + begin - first : row + end - first]
                self._gather_run(block_ids, (begin, end, base), kv_group, target)
                if self._filled[kv_group] < self.row_bytes:
                    target[:, self._filled[kv_group] :] = 0  # a row means nothing but its block

    def _gather_run(
        self, block_ids: Sequence[int], run: tuple[int, int, int], kv_group: int, target: Rows
    ) -> None:
        first, last, base = run
        for begin, end, blocks_slice in _even_runs(block_ids, first, last, base):
            piece = target[begin - first : end - first]
            for start, stop, shape, blocks in self._parts[kv_group]:
                piece[:, start:stop].reshape(-1, *shape)[...] = blocks[blocks_slice]

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy rows to blocks: one copy per run of adjacent rows, wherever the blocks are."""
        del after
        for first, last, row in row_runs(tier_rows):
            for begin, end, kv_group, base in self._addresses.runs(block_ids, first, last):
                destinations = np.array(block_ids[begin:end], dtype=np.intp) - base
                source = rows[row + begin - first : row + end - first]
                for start, stop, shape, blocks in self._parts[kv_group]:
                    blocks[destinations] = source[:, start:stop].reshape(-1, *shape)


class DevicePagedBlocks:
    """Paged blocks on an accelerator: gathered there, then moved to pinned rows on a side stream.

    Mutable state: the side stream, used by the transfer threads one at a time per call. On CPU
    tensors it runs without streams, which is how its logic is tested.
    """

    batch_blocks = 64  # bounds the staging buffer on the device

    def __init__(self, groups: GroupViews, block_count: int) -> None:
        self._device = next(view.tensor.device for views in groups.values() for view in views)
        self._addresses = _Addresses(groups, block_count)
        self.row_bytes = self._addresses.row_bytes
        self._views = {
            kv_group: [_device_view(view, block_count) for view in views]
            for kv_group, views in groups.items()
        }
        self._is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None

    def ready_mark(self) -> object:
        """An event behind everything that the current stream was given so far."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy blocks to rows; returns when the bytes are on the host."""
        pool = torch.from_numpy(rows)
        with torch.cuda.stream(self._stream):  # a null context when the stream is None
            self._wait(after)
            runs = self._addresses.runs(block_ids, 0, len(block_ids))
            staged = [self._staged(block_ids[run[0] : run[1]], *run[2:]) for run in runs]
            block = staged[0] if len(staged) == 1 else torch.cat(staged, dim=0)
            for first, last, row in row_runs(tier_rows):
                pool[row : row + last - first].copy_(block[first:last], non_blocking=True)
            self._finish()

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy rows to blocks; returns when the blocks are complete on the device."""
        pool = _readable_tensor(rows)
        with torch.cuda.stream(self._stream):
            self._wait(after)
            block = torch.empty(
                (len(block_ids), self.row_bytes), dtype=torch.uint8, device=self._device
            )
            for first, last, row in row_runs(tier_rows):
                block[first:last].copy_(pool[row : row + last - first], non_blocking=True)
            for begin, end, kv_group, base in self._addresses.runs(block_ids, 0, len(block_ids)):
                index = self._index(block_ids[begin:end], base)
                start = 0
                for view in self._views[kv_group]:
                    stop = start + view[0].numel()
                    source = block[begin:end, start:stop]
                    view.index_copy_(0, index, source.reshape(-1, *view.shape[1:]))
                    start = stop
            self._finish()

    def _staged(self, block_ids: Sequence[int], kv_group: int, base: int) -> torch.Tensor:
        """Blocks of one kv group as rows on the device; what they do not fill is zero."""
        index = self._index(block_ids, base)
        parts = [
            torch.index_select(view, 0, index).reshape(len(block_ids), -1)
            for view in self._views[kv_group]
        ]
        missing_bytes = self.row_bytes - sum(part.shape[1] for part in parts)
        if missing_bytes:
            shape = (len(block_ids), missing_bytes)
            parts.append(torch.zeros(shape, dtype=torch.uint8, device=self._device))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _index(self, block_ids: Sequence[int], base: int) -> torch.Tensor:
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self._device) - base

    def _wait(self, after: object) -> None:
        if self._stream is not None and isinstance(after, torch.cuda.Event):
            self._stream.wait_event(after)

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()


def _host_parts(
    views: Sequence[BlockView], block_count: int
) -> list[tuple[int, int, tuple[int, ...], Rows]]:
    """Where each view's bytes are in a row, how they are shaped, and all blocks of the view."""
    parts = []
    start = 0
    for view in views:
        shape = tuple(size for size, _ in view.dims)
        stop = start + view.block_bytes
        parts.append((start, stop, shape, _host_array(view, block_count)))
        start = stop
    return parts


def _host_array(view: BlockView, block_count: int) -> Rows:
    """The view as a numpy array over the tensor's own memory: (blocks, *dims) of bytes."""
    storage = view.tensor.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = np.frombuffer(memory, dtype=np.uint8)
    shape = (block_count, *(size for size, _ in view.dims))
    strides = (view.block_stride, *(stride for _, stride in view.dims))
    return as_strided(flat[view.offset :], shape=shape, strides=strides)


def _device_view(view: BlockView, block_count: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=view.tensor.device)
    flat.set_(view.tensor.untyped_storage())
    shape = (block_count, *(size for size, _ in view.dims))
    strides = (view.block_stride, *(stride for _, stride in view.dims))
    return torch.as_strided(flat, shape, strides, view.offset)


def row_runs(tier_rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Adjacent rows as `(first position, position after the last, first row)`."""
    runs: list[tuple[int, int, int]] = []
    for position, row in enumerate(tier_rows):
        if runs and row == runs[-1][2] + position - runs[-1][0]:
            runs[-1] = (runs[-1][0], position + 1, runs[-1][2])
        else:
            runs.append((position, position + 1, row))
    return runs


def _even_runs(
    block_ids: Sequence[int], first: int, last: int, base: int
) -> "list[tuple[int, int, slice[int, int | None, int]]]":
    """Positions `[first, last)` as runs of evenly spaced blocks: `(begin, end, slice of blocks)`.

    The slice is of the blocks from address `base` on.

    vLLM hands blocks out in runs, ascending when fresh and descending when they come back.
    """
    runs: list[tuple[int, int, slice[int, int | None, int]]] = []
    begin = first
    while begin < last:
        end = begin + 1
        step = block_ids[end] - block_ids[begin] if end < last else 1
        while end < last and step and block_ids[end] - block_ids[end - 1] == step:
            end += 1
        start = block_ids[begin] - base
        stop = block_ids[end - 1] - base + (1 if step >= 0 else -1)
        runs.append((begin, end, slice(start, None if stop < 0 else stop, step or 1)))
        begin = end
    return runs
