"""Where the bytes of a block are, for any layout that vLLM hands over.

Every layer is a view with the block in dimension 0 and any strides. Layers are described by byte
strides, layers at a constant distance are merged, and dimensions that adjoin in memory are joined,
so that most models end as one view of (blocks, layers, page) and a block is one strided copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

# A layer's blocks: one tensor, or several that are parts of every block (a Mamba layer's states).
LayerCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class UnsupportedLayoutError(ValueError):
    """A KV tensor whose blocks cannot be copied faithfully; the message names it."""


class BlockView(NamedTuple):
    """One or several layers' bytes of every block, by byte offset into one storage.

    Block `b` occupies the bytes that `dims` (sizes and strides, outermost first, the last one
    contiguous) describe from `offset + b * block_stride` on.
    """

    tensor: torch.Tensor  # keeps the storage alive and names it
    offset: int
    block_stride: int
    dims: tuple[tuple[int, int], ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this view."""
        size = 1
        for count, _ in self.dims:
            size *= count
        return size


def block_views(
    kv_caches: Mapping[str, LayerCache], page_bytes: Mapping[str, int], block_count: int
) -> list[BlockView]:
    """The views that together hold every byte of every block of one kv group, in memory order.

    Args:
        kv_caches: Layer name to tensor, block in dimension 0, maybe as kernel blocks that divide
            a block evenly; or to several such tensors, which together are the layer's blocks.
        page_bytes: Layer name to the bytes that one block of the layer has, without padding that
            need not be kept.
        block_count: Blocks of the engine.

    Raises:
        UnsupportedLayoutError: A page has more bytes than its view shows and is not contiguous.
    """
    single: dict[tuple[int, int], BlockView] = {}
    for name, cache in kv_caches.items():
        for view in _layer_views(name, cache, page_bytes[name], block_count):
            # Layers that share their KV alias one page: copied once.
            single.setdefault((view.tensor.data_ptr(), view.block_stride), view)
    ordered = sorted(single.values(), key=lambda view: (_storage(view.tensor), view.offset))
    return [_merge(run) for run in _runs(ordered)]


def _layer_views(
    name: str, cache: LayerCache, page_bytes: int, block_count: int
) -> list[BlockView]:
    if isinstance(cache, torch.Tensor):
        view = _tensor_view(name, cache, block_count)
        return [_whole_page(name, view, page_bytes, block_count)]
    views = [_tensor_view(name, tensor, block_count) for tensor in cache]
    shown_bytes = sum(view.block_bytes for view in views)
    if shown_bytes != page_bytes:
        raise UnsupportedLayoutError(
            f"{name}: a block has {page_bytes} bytes, its {len(views)} tensors show {shown_bytes}"
        )
    return views


def _tensor_view(name: str, tensor: torch.Tensor, block_count: int) -> BlockView:
    if block_count < 1 or tensor.shape[0] % block_count:
        raise UnsupportedLayoutError(
            f"{name}: {tensor.shape[0]} kernel blocks do not divide into {block_count} blocks"
        )
    item_bytes = tensor.element_size()
    kernel_blocks = tensor.shape[0] // block_count
    kernel_stride = tensor.stride(0) * item_bytes
    dims = [(kernel_blocks, kernel_stride), (item_bytes, 1)]
    dims += [
        (size, stride * item_bytes)
        for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    ]
    return BlockView(
        tensor, tensor.storage_offset() * item_bytes, kernel_blocks * kernel_stride, _join(dims)
    )


def _whole_page(name: str, view: BlockView, page_bytes: int, block_count: int) -> BlockView:
    if view.block_bytes == page_bytes:
        return view
    # Something lies in the page that the view does not show (scales, padding): take the page whole.
    end = view.offset + (block_count - 1) * view.block_stride + page_bytes
    contiguous = len(view.dims) == 1 and view.block_bytes < page_bytes <= view.block_stride
    if not contiguous or end > view.tensor.untyped_storage().nbytes():
        raise UnsupportedLayoutError(
            f"{name}: a block has {page_bytes} bytes, its view shows {view.block_bytes}, "
            "and the rest cannot be reached"
        )
    return view._replace(dims=((page_bytes, 1),))


def _join(dims: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Dimensions in memory order, adjoining ones as one."""
    joined: list[tuple[int, int]] = []
    for size, stride in sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1]):
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    if not joined or joined[-1][1] != 1:
        joined.append((1, 1))
    return tuple(joined)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _runs(ordered: Sequence[BlockView]) -> list[list[BlockView]]:
    """Neighbours of one shape at one distance from each other."""
    runs: list[list[BlockView]] = []
    for view in ordered:
        last = runs[-1] if runs else None
        if last is not None and _continues(last, view):
            last.append(view)
        else:
            runs.append([view])
    return runs


def _continues(run: Sequence[BlockView], view: BlockView) -> bool:
    last = run[-1]
    alike = (last.block_stride, last.dims) == (view.block_stride, view.dims)
    if not alike or _storage(last.tensor) != _storage(view.tensor):
        return False
    return len(run) == 1 or view.offset - last.offset == last.offset - run[-2].offset


def _merge(run: Sequence[BlockView]) -> BlockView:
    first = run[0]
    if len(run) == 1:
        return first
    distance = run[1].offset - first.offset
    return first._replace(dims=_join([(len(run), distance), *first.dims]))
