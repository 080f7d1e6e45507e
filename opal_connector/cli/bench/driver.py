"""Runs a workload against an endpoint: `await run(workload, Target(url=...))`. Needs aiohttp.

Conversations begin at their times, in order, and every turn after the answer to the one before.
What is to be sent next is made and encoded before it is due.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from opal_connector.cli.bench.client import CHAT, COMPLETIONS, Client, Target, open_session
from opal_connector.cli.bench.instances import Instances
from opal_connector.cli.bench.result import BenchResult, RequestRecord
from opal_connector.cli.bench.tiers import split_tokens
from opal_connector.cli.bench.words import spell
from opal_connector.cli.bench.workload import Conversation, Message, Turn, Vocabulary, Workload

OnRecord = Callable[[RequestRecord], None]
_NO_LIMIT: Final = 1 << 31
_DEFAULT_VOCABULARY: Final = Vocabulary()


async def run(
    workload: Workload,
    target: Target,
    *,
    vocabulary: Vocabulary = _DEFAULT_VOCABULARY,
    on_record: OnRecord = lambda _record: None,
    stop: asyncio.Event | None = None,
) -> BenchResult:
    """Sends all requests of a workload and returns what came of every one.

    Args:
        workload: What to ask.
        target: Whom to ask, and how.
        vocabulary: The token ids that prompts are made of.
        on_record: Told of every request when it is over.
        stop: Ends the run when it is set; what was under way is cut off and no record.

    Raises:
        CommandFailure: No model was named and the server names none.
        WorkloadError: A trace of the workload is not what it should be.
    """
    endpoint = target.endpoint or (CHAT if workload.is_chat else COMPLETIONS)
    async with open_session() as session:
        client = Client(target, session, endpoint)
        await client.find_model()
        instances = Instances(target, session)
        await instances.begin()
        run = _Run(workload, client, on_record)
        await run.all(vocabulary, stop or asyncio.Event())
        split = split_tokens(run.records, await instances.end())
    return BenchResult(
        workload=workload.kind,
        settings={
            **msgspec.to_builtins(workload, enc_hook=str),  # a trace is a path
            "vocab_size": vocabulary.end,
        },
        url=target.base,
        endpoint=endpoint,
        model=client.model,
        duration_seconds=_duration_seconds(run.records),
        requests=run.records,
        not_sent=run.not_sent,
        is_stopped=run.is_stopped,
        cut_off=run.cut_off,
        tier_tokens=split.tier_tokens,
        client_cpu_seconds=run.cpu_seconds,
        notes=[*dict.fromkeys(instances.notes), *split.notes],
    )


def _duration_seconds(records: list[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(one.end_seconds for one in records) - min(one.sent_seconds for one in records)


class _Prompt:
    """What a conversation has said so far, and the next request.

    Mutable state: the messages; one task uses it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._messages: list[Message] = []

    def take(self, turn: Turn) -> bytes:
        """The body of the next request."""
        if turn.token_ids:
            return self._client.body(self._of_tokens(turn.token_ids), turn.output_tokens)
        if turn.is_whole:
            self._messages.clear()
        self._messages.extend(turn.messages)
        is_chat = self._client.endpoint == CHAT
        prompt = self._messages if is_chat else as_text(self._messages)
        return self._client.body(prompt, turn.output_tokens)

    def answer(self, text: str) -> None:
        """The answer becomes a part of what follows."""
        self._messages.append({"role": "assistant", "content": text})

    def _of_tokens(self, token_ids: list[int]) -> list[int] | list[Message]:
        if self._client.endpoint == CHAT:
            return [{"role": "user", "content": spell(token_ids)}]
        return token_ids


def as_text(messages: list[Message]) -> str:
    """A conversation for an endpoint that knows no messages; a longer one begins with a shorter."""
    lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
    return "".join(lines) + "assistant: "


class _Run:
    """One run while it goes on.

    Mutable state: the records, the counts and the free places; one event loop uses it.
    """

    def __init__(self, workload: Workload, client: Client, on_record: OnRecord) -> None:
        self.records: list[RequestRecord] = []
        self.not_sent = 0
        self.is_stopped = False
        self.cut_off = 0
        self._workload = workload
        self._client = client
        self._on_record = on_record
        self._requests = asyncio.Semaphore(workload.requests_at_once or _NO_LIMIT)
        self._conversations = asyncio.Semaphore(workload.conversations_at_once or _NO_LIMIT)
        self.cpu_seconds = 0.0  # of this process
        self._started = 0.0

    async def all(self, vocabulary: Vocabulary, stop: asyncio.Event) -> None:
        """Sends everything and waits for the answers, or until it is to stop."""
        work = asyncio.ensure_future(self._work(vocabulary))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self.is_stopped = not work.done()
        finally:
            stopping.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self, vocabulary: Vocabulary) -> None:
        conversations = self._workload.conversations(vocabulary)
        # A trace is read for the first one: what is wrong with it is no error among tasks, and
        # the time that it takes no part of the run.
        first = next(conversations, None)
        if first is None:
            return
        self._started, cpu_seconds = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for conversation in itertools.chain((first,), conversations):
                    await self._begin(conversation, group)
        finally:
            self.cpu_seconds = time.process_time() - cpu_seconds

    async def _begin(self, conversation: Conversation, group: asyncio.TaskGroup) -> None:
        """Waits until a conversation may begin, with its first request ready."""
        turns = iter(conversation.turns)
        turn = next(turns, None)
        if turn is None:
            return
        prompt = _Prompt(self._client)
        body = prompt.take(turn)
        due_seconds = conversation.start_seconds + turn.delay_seconds
        await self._until(due_seconds)
        await self._conversations.acquire()
        # The place is taken here: what waits for one must not pile up as tasks.
        await self._requests.acquire()
        record = self._record(conversation, 0, turn, due_seconds)
        group.create_task(self._converse(conversation, turns, prompt, body, record))

    async def _converse(
        self,
        conversation: Conversation,
        turns: Iterator[Turn],
        prompt: _Prompt,
        body: bytes,
        record: RequestRecord,
    ) -> None:
        """All turns of a conversation; a place for the first request is taken already."""
        try:
            await self._send(body, record)
            number = 1
            while record.is_success and (turn := next(turns, None)) is not None:
                due_seconds = self._now() + turn.delay_seconds
                prompt.answer(record.output_text)
                body = prompt.take(turn)
                await self._until(due_seconds)
                await self._requests.acquire()
                record = self._record(conversation, number, turn, due_seconds)
                await self._send(body, record)
                number += 1
            self.not_sent += conversation.turn_count - number
        finally:
            self._conversations.release()

    async def _send(self, body: bytes, record: RequestRecord) -> None:
        try:
            record.sent_seconds = self._now()
            await self._client.ask(body, record)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self._requests.release()
        self.records.append(record)
        self._on_record(record)

    def _record(
        self, conversation: Conversation, number: int, turn: Turn, due_seconds: float
    ) -> RequestRecord:
        return RequestRecord(
            conversation_id=conversation.conversation_id,
            turn=number,
            phase=turn.phase,
            due_seconds=due_seconds,
            # What the endpoint counts wins; it need not count.
            prompt_tokens=len(turn.token_ids)
            if turn.token_ids and self._client.endpoint == COMPLETIONS
            else None,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _until(self, seconds: float) -> None:
        # A loop's clock may be a millisecond coarse, and then it wakes too soon.
        while (wait_seconds := seconds - self._now()) > 0:
            await asyncio.sleep(wait_seconds)
