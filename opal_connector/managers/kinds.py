"""Which manager serves which kind of attention. Another kind is another entry."""

from opal_connector.keys import AttentionKind, AttentionLayout
from opal_connector.managers.single_type import (
    CrossAttentionManager,
    FullAttentionManager,
    SingleTypeManager,
    SinkFullAttentionManager,
)
from opal_connector.managers.windowed import (
    ChunkedLocalManager,
    MambaManager,
    SlidingWindowManager,
)

SINGLE_TYPE_MANAGERS: dict[str, type[SingleTypeManager]] = {
    AttentionKind.FULL: FullAttentionManager,
    AttentionKind.MLA: FullAttentionManager,
    AttentionKind.SINK: SinkFullAttentionManager,
    AttentionKind.SLIDING_WINDOW: SlidingWindowManager,
    AttentionKind.SLIDING_WINDOW_MLA: SlidingWindowManager,
    AttentionKind.CHUNKED_LOCAL: ChunkedLocalManager,
    AttentionKind.MAMBA: MambaManager,
    AttentionKind.CROSS: CrossAttentionManager,
}


def make_managers(
    layout: AttentionLayout, *, chunk_tokens: int, save_unfull_chunk: bool
) -> list[SingleTypeManager]:
    """A manager for every group of a layout.

    Raises:
        KeyError: A kind has no manager.
    """
    return [
        SINGLE_TYPE_MANAGERS[attention.kind](
            group=group,
            attention=attention,
            chunk_tokens=chunk_tokens,
            alignment_tokens=layout.alignment_tokens,
            save_unfull_chunk=save_unfull_chunk,
        )
        for group, attention in enumerate(layout.groups)
    ]
