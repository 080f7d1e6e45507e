"""The converted SmolLM2 speaks: a wrong row order or tokenizer would give noise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opal_connector.cli.models import ensure_smollm2

pytest.importorskip("gguf")
pytest.importorskip("filelock")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# A file of its own with a guard, because the engine starts its core by importing it again.
GENERATE = """
import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=512
    )
    greedy = SamplingParams(temperature=0, max_tokens=16)
    text = engine.generate(["The capital of France is"], greedy)[0].outputs[0].text
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    answer = engine.chat(chat, greedy)[0].outputs[0].text
    Path(sys.argv[2]).write_text(json.dumps([text, answer]))


if __name__ == "__main__":
    main()
"""


def test_greedy_text_is_sense(tmp_path: Path) -> None:
    """The whole model continues a plain prompt with the right word, and answers in a chat."""
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    output = tmp_path / "texts.json"
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    finished = subprocess.run(
        [sys.executable, str(script), str(ensure_smollm2()), str(output)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr[-4000:]
    text, answer = json.loads(output.read_text())
    assert text.startswith(" Paris")
    assert answer.startswith("12 + 30 =")
