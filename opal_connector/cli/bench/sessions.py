"""Conversations of several users: a shared system prompt, long documents, real answers kept."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.words import spell
from opal_connector.cli.bench.workload import (
    Conversation,
    Message,
    Turn,
    Vocabulary,
    Workload,
    arrivals,
)


class Sessions(Workload, frozen=True, kw_only=True):
    """Several users talk at the same time; a turn holds the real answers of those before it.

    All prompts begin with one system prompt. A document, if there are any, is in the first message
    of a conversation; with fewer documents than conversations, some share one. Sizes count words,
    about one token each.
    """

    kind: ClassVar[str] = "sessions"

    num_users: Annotated[int, Meta(description="Conversations.")] = 4
    turns_per_user: Annotated[int, Meta(description="Requests of a conversation.")] = 5
    system_prompt_size: Annotated[int, Meta(description="Words that all prompts share.")] = 512
    document_size: Annotated[int, Meta(description="Words of a document; 0 for none.")] = 0
    num_documents: Annotated[
        int | None, Meta(description="Different documents.  [default: one for every user]")
    ] = None
    user_message_size: Annotated[int, Meta(description="Words of a question.")] = 32
    output_tokens: Annotated[int, Meta(description="Tokens that an answer may have.")] = 64
    think_time_sec: Annotated[
        float, Meta(description="Mean time between an answer and the next question.")
    ] = 0.0
    think_jitter: Annotated[
        float, Meta(description="0: always the mean; 1: exponentially distributed.")
    ] = 1.0
    session_rate: Annotated[
        float | None, Meta(description="Conversations that begin a second.  [default: all at once]")
    ] = None
    max_concurrent_sessions: Annotated[
        int | None, Meta(description="Conversations at the same time.  [default: all]")
    ] = None
    max_outstanding_requests: Annotated[
        int | None, Meta(description="Requests under way at once.  [default: no limit]")
    ] = None
    # Texts that take the place of made-up ones, in turn.
    system_prompt: str = ""
    documents: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.check_at_least(1, "num_users", "turns_per_user", "num_documents", "output_tokens")
        self.check_at_least(1, "max_concurrent_sessions", "max_outstanding_requests")
        self.check_at_least(0, "system_prompt_size", "document_size", "think_time_sec")
        self.check_at_least(0, "think_jitter")
        self.check_at_least(1, "user_message_size")
        self.check_positive("session_rate")

    @property
    @override
    def is_chat(self) -> bool:
        return True

    @property
    @override
    def request_count(self) -> int:
        return self.num_users * self.turns_per_user

    @property
    @override
    def requests_at_once(self) -> int | None:
        return self.max_outstanding_requests

    @property
    @override
    def conversations_at_once(self) -> int | None:
        return self.max_concurrent_sessions

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One for every user."""
        for user, start_seconds in enumerate(self._starts()):
            turns = [self._turn(vocabulary, user, turn) for turn in range(self.turns_per_user)]
            yield Conversation(f"user-{user}", turns, len(turns), start_seconds)

    def _starts(self) -> Iterator[float]:
        if self.session_rate is None:
            yield from [0.0] * self.num_users
            return
        yield from arrivals(
            self.random("starts"),
            rate=self.session_rate,
            jitter=1.0,
            count=self.num_users,
            duration_seconds=None,
        )

    def _turn(self, vocabulary: Vocabulary, user: int, turn: int) -> Turn:
        question = self._question(vocabulary, user, turn)
        if turn:
            return Turn(
                output_tokens=self.output_tokens,
                messages=[{"role": "user", "content": question}],
                delay_seconds=self._think_seconds(user, turn),
            )
        system = self.system_prompt or self._text(vocabulary, self.system_prompt_size, "system")
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        document = self._document(vocabulary, user)
        content = f"{document}\n\n{question}" if document else question
        return Turn(
            output_tokens=self.output_tokens,
            messages=[*opening, {"role": "user", "content": content}],
        )

    def _question(self, vocabulary: Vocabulary, user: int, turn: int) -> str:
        if self.questions:
            return self.questions[(user * self.turns_per_user + turn) % len(self.questions)]
        return self._text(vocabulary, self.user_message_size, "question", user, turn)

    def _document(self, vocabulary: Vocabulary, user: int) -> str:
        if self.documents:
            return self.documents[user % len(self.documents)]
        return self._text(
            vocabulary,
            self.document_size,
            "document",
            user % (self.num_documents or self.num_users),
        )

    def _think_seconds(self, user: int, turn: int) -> float:
        if not self.think_time_sec:
            return 0.0
        drawn = self.random("think", user, turn).expovariate(1 / self.think_time_sec)
        return max(0.0, self.think_time_sec * (1 - self.think_jitter)) + drawn * self.think_jitter

    def _text(self, vocabulary: Vocabulary, size: int, *key: int | str) -> str:
        return spell(vocabulary.tokens(size, self.kind, self.seed, *key)) if size else ""
