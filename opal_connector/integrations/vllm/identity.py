"""What a vLLM request's KV depends on besides its tokens."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vllm.v1.request import Request

from opal_connector.keys import (
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    directory_fingerprint,
)

logger = logging.getLogger(__name__)


def is_cacheable(request: Request) -> bool:
    """Whether the request's KV can be named by its tokens.

    Prompt embeddings have no token ids; a resumable (streaming input) request may take back tokens
    that it had.
    """
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.resumable
    )


def request_identity(request: Request, lora_fingerprint: str | None) -> RequestIdentity:
    """The identity of a cacheable request, given its adapter's fingerprint if it has one."""
    lora = None
    if request.lora_request is not None:
        lora = LoraIdentity(
            name=request.lora_request.lora_name,
            path=request.lora_request.lora_path,
            fingerprint=lora_fingerprint or "",
        )
    return RequestIdentity(
        lora=lora,
        cache_salt=request.cache_salt or None,
        multimodal=tuple(
            MultimodalSpan(
                identifier=feature.identifier,
                offset_tokens=feature.mm_position.offset,
                length_tokens=feature.mm_position.length,
            )
            for feature in request.mm_features
        ),
    )


class LoraFingerprints:
    """Fingerprints of adapter directories, read in one background thread, never in a hook.

    Mutable state: the executor alone; the caller keeps the future of its request.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, path: str) -> "Future[str]":
        """Begin to read the adapter at `path`; what was read before costs a few stats."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="opal-lora")
        return self._pool.submit(_fingerprint, path)

    def close(self) -> None:
        """Drop what is not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _fingerprint(path: str) -> str:
    directory = Path(path)
    return directory_fingerprint(directory) if directory.is_dir() else f"name:{path}"
