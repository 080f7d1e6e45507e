"""What an engine must be told to run a model of ours on the CPU."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    """Settings of vLLM 0.32 that a model needs.

    Attributes:
        dtype: Of weights, activations and KV cache.
        block_size: Tokens of a block that is asked for; vLLM may take more (`block_tokens` of a
            group then differ from it).
        max_num_batched_tokens: Tokens of a prefill chunk at most, where a model needs that.
        attention_backend: Of vLLM, where the one that it would choose does not do.
    """

    dtype: str
    block_size: int
    max_num_batched_tokens: int | None = None
    attention_backend: str | None = None

    def keywords(self) -> dict[str, Any]:
        """For `vllm.LLM`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def arguments(self) -> tuple[str, ...]:
        """For the command line of vLLM's server."""
        return tuple(
            part
            for name, value in self.keywords().items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        )
