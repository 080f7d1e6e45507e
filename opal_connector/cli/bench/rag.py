"""Questions over documents: a system prompt, then some of a set of documents, in their order."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.arriving import ArrivingWorkload
from opal_connector.cli.bench.workload import Conversation, Turn, Vocabulary


class RAGWorkload(ArrivingWorkload, frozen=True, kw_only=True):
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
    max_concurrent_requests: Annotated[
        int, Meta(description="Requests under way at once; arrivals wait.")
    ] = 16

    def __post_init__(self) -> None:
        self.check_arrivals()
        self.check_at_least(1, "num_documents", "document_size", "docs_per_request")
        self.check_at_least(1, "output_tokens", "max_concurrent_requests")
        self.check_at_least(0, "system_prompt_size", "question_size")
        self.check_order("docs_per_request", "num_documents")

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
        for number, start_seconds in enumerate(self.starts()):
            prompt = list(system)
            for place in sorted(random.sample(range(self.num_documents), self.docs_per_request)):
                prompt.extend(documents[place])
            prompt.extend(vocabulary.tokens(self.question_size, "question", self.seed, number))
            turn = Turn(output_tokens=self.output_tokens, token_ids=prompt)
            yield Conversation(f"request-{number}", [turn], start_seconds=start_seconds)
