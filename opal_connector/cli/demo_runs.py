"""The runs of `opal demo`: one long prompt, cold, from the device, and from Opal's tiers."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.prometheus import Sample, sum_by_label

if TYPE_CHECKING:
    from opal_connector.cli.server_client import Answer

_OUTPUT_TOKENS: Final = 24
_ROUNDS: Final = 3
# Between runs, so that the stores of one do not take a core from the next.
_SETTLE_SECONDS: Final = 0.5
_METRICS_SECONDS_MAX: Final = 3.0
_STORED_SECONDS_MAX: Final = 30.0
_QUESTION: Final = "\n\nQuestion: In one sentence, what is the while statement for?\nAnswer:"
_UNRELATED_PROMPT: Final = "Good morning! The weather today is"


@dataclass
class Measurement:
    """The answers of one demo, and the prompt tokens that each warm one took from tiers.

    With them how many blocks vLLM has on the device, beside Opal and alone, as far as known.
    """

    cold: "Answer"
    device: list["Answer"] = field(default_factory=list)
    warm: list["Answer"] = field(default_factory=list)
    warm_hits: list[dict[str, int]] = field(default_factory=list)
    num_gpu_blocks: int | None = None
    num_gpu_blocks_without_opal: int | None = None


class Client(Protocol):
    """What the demo asks of a server; `ServerClient` is one."""

    def complete(self, prompt: str | list[int], *, max_tokens: int) -> "Answer":
        """A greedy completion."""

    def samples(self) -> list[Sample]:
        """The server's metrics now."""

    def reset_prefix_cache(self) -> None:
        """Empties the device's prefix cache."""


def demo_prompt(tokenizer_file: Path, token_count: int) -> str:
    """A real text with a question at its end, `token_count` tokens within a few."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    text: str = topics["compound"]
    question_tokens = len(tokenizer.encode(_QUESTION, add_special_tokens=False).ids)
    kept = tokenizer.encode(text, add_special_tokens=False).offsets[: token_count - question_tokens]
    return text[: kept[-1][1]] + _QUESTION


def measure(client: Client, prompt: str, reporter: Reporter) -> Measurement:
    """Runs the prompt cold, then in turn from the device and from Opal's tiers."""
    with reporter.step("warming up with another prompt", total=None):
        client.complete(_UNRELATED_PROMPT, max_tokens=4)
    with reporter.step("cold: computing the whole prompt", total=None):
        measurement = Measurement(client.complete(prompt, max_tokens=_OUTPUT_TOKENS))
    with reporter.step("again from the device, and from Opal", total=2 * _ROUNDS) as advance:
        for _ in range(_ROUNDS):
            time.sleep(_SETTLE_SECONDS)
            measurement.device.append(client.complete(prompt, max_tokens=_OUTPUT_TOKENS))
            advance(1)
            client.reset_prefix_cache()
            time.sleep(_SETTLE_SECONDS)
            answer, hits = _complete_counted(client, prompt)
            measurement.warm.append(answer)
            measurement.warm_hits.append(hits)
            advance(1)
    measurement.num_gpu_blocks = device_blocks(client.samples())
    return measurement


def device_blocks(samples: list[Sample]) -> int | None:
    """How many blocks of KV cache vLLM says its device has; it counts them for all kv groups."""
    for sample in samples:
        if sample.name == "vllm:cache_config_info":
            count = sample.labels.get("num_gpu_blocks", "")
            return int(count) if count.isdigit() else None
    return None


def _complete_counted(client: Client, prompt: str) -> tuple["Answer", dict[str, int]]:
    """An answer, and its prompt tokens by the tier that they came from.

    Raises:
        CommandFailure: vLLM's own counter of external hits disagrees with Opal's.
    """
    before = _external_hits(client.samples())
    answer = client.complete(prompt, max_tokens=_OUTPUT_TOKENS)
    deadline = time.monotonic() + _METRICS_SECONDS_MAX
    while True:
        after = _external_hits(client.samples())
        hits = {tier: after[0][tier] - before[0].get(tier, 0) for tier in after[0]}
        hits = {tier: tokens for tier, tokens in hits.items() if tokens}
        counted = after[1] - before[1]
        # Metrics follow the answer by a step of the engine.
        if (hits and sum(hits.values()) == counted) or time.monotonic() > deadline:
            break
        time.sleep(_SETTLE_SECONDS / 10)
    if sum(hits.values()) != counted:
        raise CommandFailure(
            f"Opal counts {sum(hits.values())} prompt tokens from its tiers and vLLM {counted}."
        )
    return answer, hits


def _external_hits(samples: list[Sample]) -> tuple[dict[str, int], int]:
    """Hit tokens by Opal's tier, and all that vLLM says came from outside the device."""
    by_source = sum_by_label(samples, "vllm:prompt_tokens_cached_by_source_total", "source")
    external = sum(tokens for source, tokens in by_source.items() if source != "device")
    return sum_by_label(samples, "vllm:opal_hit_tokens_total", "tier"), external


def measure_cold(
    client: Client, prompt: str, tiers: tuple[str, ...], reporter: Reporter
) -> "Answer":
    """Runs the prompt cold and waits until the last of `tiers` has taken all of it.

    Raises:
        CommandFailure: It does not come to rest.
    """
    with reporter.step("warming up with another prompt", total=None):
        client.complete(_UNRELATED_PROMPT, max_tokens=4)
    with reporter.step("cold: computing the whole prompt", total=None):
        answer = client.complete(prompt, max_tokens=_OUTPUT_TOKENS)
    with reporter.step(f"waiting until {tiers[-1]} has it", total=None):
        _await_stored(client, tiers)
    return answer


def measure_elsewhere(
    client: Client, prompt: str, cold: "Answer", reporter: Reporter
) -> Measurement:
    """Runs the prompt on a server that never computed it: from its tiers, then from its device."""
    measurement = Measurement(cold)
    with reporter.step("warming up with another prompt", total=None):
        client.complete(_UNRELATED_PROMPT, max_tokens=4)
    with reporter.step("the same prompt from Opal, then from the device", total=2) as advance:
        time.sleep(_SETTLE_SECONDS)
        answer, hits = _complete_counted(client, prompt)
        measurement.warm.append(answer)
        measurement.warm_hits.append(hits)
        advance(1)
        for _ in range(_ROUNDS):
            time.sleep(_SETTLE_SECONDS)
            measurement.device.append(client.complete(prompt, max_tokens=_OUTPUT_TOKENS))
        advance(1)
    measurement.num_gpu_blocks = device_blocks(client.samples())
    return measurement


def _await_stored(client: Client, tiers: tuple[str, ...]) -> None:
    """Wait until the last tier has no less than the first, and none of them grows any more."""
    deadline = time.monotonic() + _STORED_SECONDS_MAX
    before: dict[str, int] = {}
    while time.monotonic() < deadline:
        time.sleep(2 * _SETTLE_SECONDS)
        by_tier = sum_by_label(client.samples(), "vllm:opal_used_bytes", "tier")
        used = {tier: by_tier.get(tier, 0) for tier in tiers}
        if used == before and used[tiers[-1]] >= max(1, used[tiers[0]]):
            return
        before = used
    raise CommandFailure(f"{tiers[-1]} does not come to rest; bytes by tier: {before}.")
