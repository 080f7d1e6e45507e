"""Questions over documents: a system prompt, then some of a set of documents, in their order."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.workload import (
    Conversation,
    Turn,
    Vocabulary,
    Workload,
    arrivals,
    request_limit,
)


class RAGWorkload(Workload, frozen=True, kw_only=True):
    """Prompts of a system prompt and `docs_per_request` different documents, sorted.

    Sorted, equal first documents are a common prefix. A document behind others is found again only
    together with them: a cache of prefixes knows no other reuse. A question of the request's own,
    if any, comes last.
    """

    kind: ClassVar[str] = "rag"

    num_documents: Annotated[int, Meta(description="Documents to choose from.")] = 10
    document_size: Annotated[int, Meta(description="Tokens of a document.")] = 16384
    system_prompt_size: Annotated[int, Meta(description="Tokens before the documents.")] = 1024
    docs_per_request: Annotated[int, Meta(description="Documents of a prompt.")] = 4
    question_size: Annotated[int, Meta(description="Tokens of its own after them.")] = 0
    output_tokens: Annotated[int, Meta(description="Tokens of an answer.")] = 128
    request_rate: Annotated[float, Meta(description="Requests a second.")] = 1.0
    jitter: Annotated[
        float, Meta(description="Chance in the times of arrival; 1 is a Poisson process.")
    ] = 0.0
    total_requests: Annotated[
        int | None, Meta(description="Requests.  [default: 100, unless a duration is given]")
    ] = None
    time_duration_sec: Annotated[
        float | None, Meta(description="No request begins later.  [default: no limit]")
    ] = None
    max_concurrent_requests: Annotated[
        int, Meta(description="Requests under way at once; arrivals wait.")
    ] = 16

    def __post_init__(self) -> None:
        self.check_positive("request_rate", "time_duration_sec")
        self.check_end(self.total_requests)
        self.check_at_least(1, "num_documents", "document_size", "docs_per_request")
        self.check_at_least(1, "output_tokens", "total_requests", "max_concurrent_requests")
        self.check_at_least(0, "system_prompt_size", "question_size", "jitter")
        self.check_at_most(1, "jitter")
        self.check_order("docs_per_request", "num_documents")

    @property
    @override
    def request_count(self) -> int | None:
        if self.time_duration_sec is not None:
            return None
        return request_limit(self.total_requests, None)

    @property
    @override
    def requests_at_once(self) -> int:
        return self.max_concurrent_requests

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One request each."""
        system = vocabulary.tokens(self.system_prompt_size, "system", self.seed)
        documents = [
            vocabulary.tokens(self.document_size, "document", self.seed, number)
            for number in range(self.num_documents)
        ]
        random = self.random("documents")
        starts = arrivals(
            self.random("arrivals"),
            rate=self.request_rate,
            jitter=self.jitter,
            count=request_limit(self.total_requests, self.time_duration_sec),
            duration_seconds=self.time_duration_sec,
        )
        for number, start_seconds in enumerate(starts):
            prompt = list(system)
            for place in sorted(random.sample(range(self.num_documents), self.docs_per_request)):
                prompt.extend(documents[place])
            prompt.extend(vocabulary.tokens(self.question_size, "question", self.seed, number))
            turn = Turn(output_tokens=self.output_tokens, token_ids=prompt)
            yield Conversation(f"request-{number}", [turn], start_seconds=start_seconds)
