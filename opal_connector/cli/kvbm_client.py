"""Asks one instance over its event channel: who it is, and what its tiers hold now."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

from opal_connector.events.channel import (
    FORMAT_VERSION,
    MAX_PAYLOAD_BYTES,
    AskContents,
    AskDescription,
    AskDigests,
    Contents,
    Description,
    DigestsNow,
    MessageError,
    Question,
    Refused,
    Reply,
    decode_reply,
    encode_message,
)
from opal_connector.keys import HASH_BYTES

ANSWER_SECONDS: Final = 10.0
_Kind = TypeVar("_Kind", bound=Reply)


class NoAnswerError(Exception):
    """An instance did not answer, or not what it was asked; the text says what happened."""


class Held(msgspec.Struct):
    """What one tier holds of one group: the blocks, and when that is true."""

    incarnation: int
    sequence: int
    blocks: set[bytes]
    is_complete: bool


class InstanceClient:
    """A connection to the question socket of one instance.

    Mutable state: the number of the last question. One task uses it, one question at a time.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._socket.connect(endpoint)
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    async def description(self) -> Description:
        """Who the instance is.

        Raises:
            NoAnswerError: It did not say.
        """
        return await self._one(AskDescription(FORMAT_VERSION, 0), Description)

    async def digests(self) -> DigestsNow:
        """How far it is, and which places it has; raises as `description`."""
        return await self._one(AskDigests(FORMAT_VERSION, 0), DigestsNow)

    async def contents(self, group: int, tier: str) -> Held:
        """All blocks of one group in one tier; raises as `description`."""
        held: Held | None = None
        question = AskContents(FORMAT_VERSION, 0, group, tier)
        async for part in self._parts(question, Contents):
            if held is None:
                held = Held(part.incarnation, part.sequence, set(), is_complete=True)
            for fact in part.facts:
                run = fact.block_hashes
                held.blocks.update(
                    run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES)
                )
            held.is_complete = held.is_complete and part.is_complete
            if part.is_last:
                return held
        raise NoAnswerError(f"{self.endpoint} ended its answer too early.")

    async def _one(self, question: Question, kind: type[_Kind]) -> _Kind:
        async for reply in self._parts(question, kind):
            return reply
        raise NoAnswerError(f"{self.endpoint} did not answer.")

    async def _parts(self, question: Question, kind: type[_Kind]) -> AsyncIterator[_Kind]:
        """The answers to one question as they come; whoever asks knows which one is the last."""
        self._last_id += 1
        payload = encode_message(msgspec.structs.replace(question, request_id=self._last_id))
        await self._socket.send_multipart([b"", payload])
        while True:
            reply = await self._reply()
            if reply.request_id != self._last_id:
                continue  # a late answer to an earlier question
            if isinstance(reply, Refused):
                raise NoAnswerError(f"{self.endpoint} refused: {reply.reason}.")
            if not isinstance(reply, kind):
                raise NoAnswerError(f"{self.endpoint} answered something else.")
            yield reply

    async def _reply(self) -> Reply:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                frames = await self._socket.recv_multipart()
            return decode_reply(frames[-1])
        except TimeoutError as error:
            raise NoAnswerError(
                f"{self.endpoint} did not answer within {ANSWER_SECONDS:g} s."
            ) from error
        except MessageError as error:
            raise NoAnswerError(f"{self.endpoint} cannot be understood: {error}.") from error
