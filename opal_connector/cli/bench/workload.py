"""What a benchmark asks: conversations of turns at given times, made from a seed alone.

A workload is a frozen set of parameters; equal parameters make equal prompts in every process.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import shake_128
from random import Random
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta

Message = dict[str, Any]  # as the OpenAI API has it: "role" and "content" at least
FIRST_TOKEN_ID: Final = 32
_DIGEST_BYTES: Final = 4  # of a token id
_REQUESTS_WITHOUT_A_LIMIT: Final = 100


class WorkloadError(ValueError):
    """A parameter that cannot be: its name, what was found, what is allowed."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The token ids that prompts are made of: from `first` to before `end`.

    The default is small enough for every model that is served; many begin with special tokens,
    which are left out.
    """

    first: int = FIRST_TOKEN_ID
    end: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise WorkloadError(
                f"vocabulary: found {self.end} token ids, allowed: more than {self.first}"
            )

    def tokens(self, count: int, *key: int | str) -> list[int]:
        """So many token ids that look random; the longer run of a key begins with the shorter."""
        # A hash of any length: the same in every process and with every version of anything.
        digest = shake_128(repr(key).encode()).digest(_DIGEST_BYTES * count)
        numbers = np.frombuffer(digest, dtype="<u4")
        ids: list[int] = (numbers % (self.end - self.first) + self.first).tolist()
        return ids


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a conversation, as far as it adds to those before.

    Attributes:
        output_tokens: Tokens that the answer may have.
        token_ids: A prompt of token ids, which stands for itself.
        messages: Or messages, which follow those before and their answers.
        is_whole: The messages are the whole prompt; nothing before counts.
        delay_seconds: From the end of the turn before, or from the conversation's start.
        phase: A part of the workload that is reported on its own.
    """

    output_tokens: int
    token_ids: list[int] = []
    messages: list[Message] = []
    is_whole: bool = False
    delay_seconds: float = 0.0
    phase: str = ""


@dataclass(frozen=True)
class Conversation:
    """Turns of which each begins after the answer to the one before.

    Attributes:
        conversation_id: Unique in its workload.
        turns: Made when they are asked for; long prompts need not all be in memory.
        turn_count: How many there are.
        start_seconds: When it may begin, from the start of the benchmark.
    """

    conversation_id: str
    turns: Iterable[Turn]
    turn_count: int = 1
    start_seconds: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a workload, and what follows from them.

    Conversations come in the order of their start.
    """

    kind: ClassVar[str] = ""

    seed: Annotated[int, Meta(description="Equal seeds make equal workloads.")] = 0

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages; else they are token ids."""
        return False

    @property
    def request_count(self) -> int | None:
        """All requests, None where only the time ends it."""
        return None

    @property
    def requests_at_once(self) -> int | None:
        """The most requests under way; others wait. None is no limit."""
        return None

    @property
    def conversations_at_once(self) -> int | None:
        """The most conversations that have begun and not ended. None is no limit."""
        return None

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """All conversations, in the order of their start."""
        raise NotImplementedError

    def random(self, *purpose: int | str) -> Random:
        """A source of chance for one purpose, the same in every process."""
        return Random(repr((self.kind, self.seed, *purpose)))

    def check_at_least(self, least: float, *fields: str) -> None:
        """Refuses a field below `least`; None is no number and passes.

        Raises:
            WorkloadError: One is.
        """
        for field in fields:
            value = getattr(self, field)
            if value is not None and not value >= least:
                raise WorkloadError(f"{field}: found {value:g}, allowed: {least:g} or more")

    def check_at_most(self, most: float, *fields: str) -> None:
        """Refuses a field above `most`.

        Raises:
            WorkloadError: One is.
        """
        for field in fields:
            value = getattr(self, field)
            if value is not None and not value <= most:
                raise WorkloadError(f"{field}: found {value:g}, allowed: {most:g} or less")

    def check_positive(self, *fields: str) -> None:
        """Refuses a field that is not above zero.

        Raises:
            WorkloadError: One is not.
        """
        for field in fields:
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise WorkloadError(f"{field}: found {value:g}, allowed: more than 0")

    def check_order(self, low: str, high: str) -> None:
        """Refuses a lower limit above the upper one.

        Raises:
            WorkloadError: It is.
        """
        if getattr(self, low) > getattr(self, high):
            raise WorkloadError(
                f"{low}: found {getattr(self, low)}, allowed: at most {high}, "
                f"which is {getattr(self, high)}"
            )


def request_limit(total_requests: int | None, time_duration_sec: float | None) -> int | None:
    """How many requests there are at most: a workload without any limit would never end."""
    if total_requests is None and time_duration_sec is None:
        return _REQUESTS_WITHOUT_A_LIMIT
    return total_requests


def arrivals(
    random: Random,
    *,
    rate: float,
    jitter: float,
    count: int | None,
    duration_seconds: float | None,
) -> Iterator[float]:
    """Times of arrival: equally far apart without jitter, a Poisson process with a jitter of 1."""
    mean = 1 / rate
    now = 0.0
    number = 0
    while (count is None or number < count) and (
        duration_seconds is None or now < duration_seconds
    ):
        yield now
        number += 1
        now += mean * (1 - jitter) + (random.expovariate(rate) * jitter if jitter else 0.0)
