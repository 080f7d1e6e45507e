"""A model without weights whose every KV byte counts.

Token i's KV is a digest of the whole prefix up to i, of the adapter, the salt and the images. The
next token is a function of the bytes of all KV slots that the block table points to, so one wrong,
stale or missing byte gives another output. `ByteModel.expected` computes that output without any
cache; `FakeRunner` computes it in paged tensors, from what vLLM sends its workers.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from xxhash import xxh3_64_intdigest

LAYER_NAMES = ("layer.0", "layer.1")
SLOT_BYTES = 32  # per token and layer: one digest
VOCABULARY = 1 << 15
TRASH = 0xEE

Slots = NDArray[np.uint8]


class Identity(NamedTuple):
    """What a request's KV depends on besides its tokens: `(identifier, offset, length)` images."""

    lora: str = ""
    salt: str = ""
    images: tuple[tuple[str, int, int], ...] = ()

    @property
    def root(self) -> bytes:
        """What the first token's KV begins from."""
        return sha256(f"{self.lora}|{self.salt}".encode()).digest()

    def image_at(self, position: int) -> bytes:
        """What stands at a placeholder token."""
        for name, offset, length in self.images:
            if offset <= position < offset + length:
                return f"{name}@{position - offset}".encode()
        return b""


class Prefix:
    """The digests of one growing sequence."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._tokens: list[int] = []
        self._digests = bytearray()

    def slots(self, tokens: Sequence[int]) -> Slots:
        """One row per token. Sequences may part from the last one asked for."""
        common = _common(self._tokens, tokens)
        del self._tokens[common:]
        del self._digests[common * SLOT_BYTES :]
        digest = bytes(self._digests[-SLOT_BYTES:]) or self._identity.root
        for position in range(common, len(tokens)):
            token = tokens[position]
            image = self._identity.image_at(position)
            digest = sha256(digest + (token & 0xFFFFFFFF).to_bytes(4, "little") + image).digest()
            self._tokens.append(token)
            self._digests += digest
        return np.frombuffer(bytes(self._digests), dtype=np.uint8).reshape(-1, SLOT_BYTES)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


def _mask(rank: int, layer: int) -> Slots:
    """Makes the same digest other bytes in every layer and rank."""
    return np.frombuffer(sha256(f"{rank}/{layer}".encode()).digest(), dtype=np.uint8)


def _next_token(parts: Iterable[Slots]) -> int:
    seed = 0
    for part in parts:
        seed = xxh3_64_intdigest(np.ascontiguousarray(part).tobytes(), seed=seed)
    return seed % VOCABULARY


class ByteModel:
    """What the model would answer if nothing were ever cached."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.masks = [
            [_mask(rank, layer) for layer in range(len(LAYER_NAMES))] for rank in range(ranks)
        ]

    def expected(
        self, prompt: Sequence[int], count: int, identity: Identity | None = None
    ) -> list[int]:
        """The first `count` tokens that follow a prompt."""
        prefix = Prefix(identity or Identity())
        tokens = list(prompt)
        for _ in range(count):
            slots = prefix.slots(tokens)
            tokens.append(_next_token(slots ^ mask for masks in self.masks for mask in masks))
        return tokens[len(prompt) :]


class RunnerRequest:
    """A worker's view of one request, kept as vLLM's runner keeps it."""

    def __init__(self, tokens: Sequence[int], block_ids: Sequence[int], identity: Identity) -> None:
        self.tokens = list(tokens)
        self.block_ids = list(block_ids)
        self.prefix = Prefix(identity)


class FakeRunner:
    """The runners of all ranks in one: paged tensors and what they hold of the requests."""

    def __init__(self, model: ByteModel, *, num_blocks: int, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        shape = (len(LAYER_NAMES), num_blocks, 1, block_tokens, SLOT_BYTES)
        self.tensors = [torch.full(shape, TRASH, dtype=torch.uint8) for _ in range(model.ranks)]
        self._pages = [tensor.numpy() for tensor in self.tensors]
        self._requests: dict[str, RunnerRequest] = {}
        self.salts: dict[str, str] = {}  # vLLM does not tell its workers

    def kv_caches(self, rank: int) -> dict[str, torch.Tensor]:
        """As vLLM registers them."""
        return {name: self.tensors[rank][layer] for layer, name in enumerate(LAYER_NAMES)}

    def block_bytes(self, rank: int, block_id: int) -> bytes:
        """All bytes of one block."""
        return self._pages[rank][:, block_id].tobytes()

    def last_block_ids(self, request_id: str) -> list[int]:
        """A request's block table as the workers saw it last."""
        return self._requests[request_id].block_ids

    def prefix_blocks(self, tokens: Sequence[int], rank: int = 0) -> list[bytes]:
        """What the blocks of a prompt must hold."""
        slots = Prefix(Identity()).slots(tokens).reshape(-1, self.block_tokens, SLOT_BYTES)
        return [
            b"".join((block ^ mask).tobytes() for mask in self.model.masks[rank]) for block in slots
        ]

    def trash(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks that nobody may read any more."""
        for pages in self._pages:
            pages[:, list(block_ids)] = TRASH

    def update(self, output: SchedulerOutput) -> None:
        """Take in new and resumed requests and block tables, as `_update_states` does."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            if tokens is None:
                tokens = [0] * len(new.prompt_embeds)
            self._requests[new.req_id] = RunnerRequest(
                tokens, new.block_ids[0], self._identity(new)
            )
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            request = self._requests[request_id]
            if request_id in cached.resumed_req_ids:
                request.block_ids = []
                request.tokens = list(cached.all_token_ids[request_id])
            if block_ids is not None:
                request.block_ids += block_ids[0]

    def forward(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Compute the scheduled tokens on all ranks, then sample; request to new tokens."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            tokens = request.tokens + drafts.get(request_id, [])
            self._write(request, tokens, computed[request_id], computed[request_id] + count)
        return {
            request_id: self._sample(
                self._requests[request_id], computed[request_id] + count, drafts.get(request_id, [])
            )
            for request_id, count in output.num_scheduled_tokens.items()
        }

    def _write(self, request: RunnerRequest, tokens: Sequence[int], start: int, stop: int) -> None:
        assert stop <= len(tokens), "vLLM scheduled a token that does not exist"
        slots = request.prefix.slots(tokens)[start:stop]
        positions = np.arange(start, stop)
        blocks = np.array(request.block_ids)[positions // self.block_tokens]
        assert blocks.all(), "block 0 is nobody's"
        for masks, pages in zip(self.model.masks, self._pages, strict=True):
            for layer, mask in enumerate(masks):
                pages[layer, blocks, 0, positions % self.block_tokens] = slots ^ mask

    def _sample(self, request: RunnerRequest, stop: int, drafts: Sequence[int]) -> list[int]:
        known = len(request.tokens)
        if stop < known:
            return []  # a chunk of the prompt
        sampled = [self._next(request, known)]
        for accepted, draft in enumerate(drafts[: stop - known], start=1):
            if draft != sampled[-1]:
                break
            sampled.append(self._next(request, known + accepted))
        request.tokens += sampled
        return sampled

    def _next(self, request: RunnerRequest, length: int) -> int:
        table = request.block_ids[: -(-length // self.block_tokens)]
        return _next_token(
            pages[layer, table].reshape(-1, SLOT_BYTES)[:length]
            for pages in self._pages
            for layer in range(len(LAYER_NAMES))
        )

    def _identity(self, new: Any) -> Identity:
        return Identity(
            lora=new.lora_request.lora_name if new.lora_request is not None else "",
            salt=self.salts.get(new.req_id, ""),
            images=tuple(
                (item.identifier, item.mm_position.offset, item.mm_position.length)
                for item in new.mm_features
            ),
        )


def propose(model: ByteModel, tokens: Mapping[str, Sequence[int]], count: int) -> dict[str, list]:
    """Drafts of which every second token is wrong, so that some are taken and some rejected."""
    drafts = {}
    for request_id, known in tokens.items():
        right = model.expected(known, count)
        drafts[request_id] = [
            token if (len(known) + place) % 3 else (token + 1) % VOCABULARY
            for place, token in enumerate(right)
        ]
    return drafts
