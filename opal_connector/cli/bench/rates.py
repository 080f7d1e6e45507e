"""Single requests that arrive at a rate, over prompts that truly share their beginnings."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.arriving import ArrivingWorkload
from opal_connector.cli.bench.workload import Conversation, Turn, Vocabulary


class UniformReqRate(ArrivingWorkload, frozen=True, kw_only=True):
    """Requests equally far apart; a jitter above 0 mixes chance into the distance.

    A prompt is one of `prefixes` beginnings of `default_prefix_length` tokens, drawn at random, and
    tokens of its own, at least one.
    """

    kind: ClassVar[str] = "uniform"

    request_rate: Annotated[float, Meta(description="Requests a second.")] = 2.0
    prompt_size_min: Annotated[int, Meta(description="Tokens of the shortest prompt.")] = 1025
    prompt_size_max: Annotated[int, Meta(description="Tokens of the longest prompt.")] = 2048
    output_tokens_min: Annotated[int, Meta(description="Tokens of the shortest answer.")] = 32
    output_tokens_max: Annotated[int, Meta(description="Tokens of the longest answer.")] = 128
    default_prefix_length: Annotated[int, Meta(description="Tokens of a shared beginning.")] = 1024
    prefixes: Annotated[int, Meta(description="Different shared beginnings.")] = 1
    max_outstanding_requests: Annotated[
        int, Meta(description="Requests under way at once; arrivals wait.")
    ] = 32

    def __post_init__(self) -> None:
        self.check_arrivals()
        self.check_at_least(1, "output_tokens_min", "prefixes")
        self.check_at_least(1, "max_outstanding_requests")
        self.check_at_least(0, "default_prefix_length")
        self.check_at_least(self.default_prefix_length + 1, "prompt_size_min")
        self.check_order("prompt_size_min", "prompt_size_max")
        self.check_order("output_tokens_min", "output_tokens_max")

    @property
    @override
    def requests_at_once(self) -> int:
        return self.max_outstanding_requests

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One request each."""
        length = self.default_prefix_length
        prefixes = [
            vocabulary.tokens(length, "prefix", self.seed, number)
            for number in range(self.prefixes)
        ]
        random = self.random("requests")
        for number, start_seconds in enumerate(self.starts()):
            size = random.randint(self.prompt_size_min, self.prompt_size_max)
            output_tokens = random.randint(self.output_tokens_min, self.output_tokens_max)
            prefix = prefixes[random.randrange(self.prefixes)]
            own = vocabulary.tokens(size - length, "own", self.seed, number)
            turn = Turn(output_tokens=output_tokens, token_ids=[*prefix, *own])
            yield Conversation(f"request-{number}", [turn], start_seconds=start_seconds)


class ExponentialReqRate(UniformReqRate, frozen=True, kw_only=True):
    """Requests of a Poisson process, unless the jitter is below 1."""

    kind: ClassVar[str] = "poisson"

    jitter: Annotated[
        float, Meta(description="Chance in the times of arrival; 1 is a Poisson process.")
    ] = 1.0
