"""Prompts of growing size, each computed once and then asked for again."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.workload import Conversation, Turn, Vocabulary, Workload

COLD: Final = "cold"
WARM: Final = "warm"


class SC25Workload(Workload, frozen=True, kw_only=True):
    """A cold pass over different prompts, then an identical warm one; one request at a time.

    Sizes grow in equal steps. The seed must differ from that of earlier runs, or the first pass
    finds their prompts.
    """

    kind: ClassVar[str] = "sc25"

    num_prompts: Annotated[int, Meta(description="Prompts of a pass.")] = 10
    prompt_size_min: Annotated[int, Meta(description="Tokens of the first prompt.")] = 4092
    prompt_size_max: Annotated[int, Meta(description="Tokens of the last prompt.")] = 130944
    output_tokens: Annotated[int, Meta(description="Tokens of an answer.")] = 16
    warm_passes: Annotated[int, Meta(description="Passes after the first.")] = 1
    pause_sec: Annotated[
        float, Meta(description="Before every pass but the first, for stores to end.")
    ] = 1.0

    def __post_init__(self) -> None:
        self.check_at_least(1, "num_prompts", "prompt_size_min", "output_tokens")
        self.check_at_least(0, "pause_sec", "warm_passes")
        self.check_order("prompt_size_min", "prompt_size_max")

    @property
    @override
    def request_count(self) -> int:
        return self.num_prompts * (1 + self.warm_passes)

    @property
    @override
    def requests_at_once(self) -> int:
        return 1

    @property
    def sizes(self) -> list[int]:
        """The prompts' tokens, growing."""
        if self.num_prompts == 1:
            return [self.prompt_size_max]
        step = (self.prompt_size_max - self.prompt_size_min) / (self.num_prompts - 1)
        return [self.prompt_size_min + round(step * place) for place in range(self.num_prompts)]

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One for all, since every request follows the end of the one before."""
        yield Conversation("passes", self._turns(vocabulary), self.request_count)

    def _turns(self, vocabulary: Vocabulary) -> Iterator[Turn]:
        for number in range(1 + self.warm_passes):
            for place, size in enumerate(self.sizes):
                yield Turn(
                    output_tokens=self.output_tokens,
                    token_ids=vocabulary.tokens(size, "prompt", self.seed, place),
                    delay_seconds=self.pause_sec if number and not place else 0.0,
                    phase=WARM if number else COLD,
                )
