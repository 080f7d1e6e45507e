"""The converted models speak: a wrong row order, norm, window or tokenizer would give noise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opal_connector.cli.model_library import ensure_download, ensure_smollm2

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
        model=sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=2048
    )
    greedy = SamplingParams(temperature=0, max_tokens=16)
    prompts = json.loads(sys.argv[3])
    texts = [output.outputs[0].text for output in engine.generate(prompts, greedy)]
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    texts.append(engine.chat(chat, greedy)[0].outputs[0].text)
    Path(sys.argv[2]).write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
"""


def generate(model: Path, prompts: list[str], directory: Path) -> list[str]:
    """What the model says to every prompt, and to a question in a chat at last."""
    script = directory / "generate.py"
    script.write_text(GENERATE)
    output = directory / "texts.json"
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    finished = subprocess.run(
        [sys.executable, str(script), str(model), str(output), json.dumps(prompts)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    texts: list[str] = json.loads(output.read_text())
    return texts


def test_greedy_text_is_sense(tmp_path: Path) -> None:
    """The whole model continues a plain prompt with the right word, and answers in a chat."""
    text, answer = generate(ensure_smollm2(), ["The capital of France is"], tmp_path)

    assert text.startswith(" Paris")
    assert answer.startswith("12 + 30 =")


def test_gemma3_speaks_beyond_its_window(tmp_path: Path) -> None:
    """Short prompts and one of more than two windows are all continued with sense."""
    census = " ".join(f"In the year {year}, it had {year * 3} people." for year in range(100, 180))
    prompts = [
        "Once upon a time, there was a little",
        "Water boils at a temperature of",
        f"The city of Rome grew. {census} The capital of Italy is",
    ]

    tale, water, census_end, _ = generate(ensure_download("gemma3-270m"), prompts, tmp_path)

    assert tale.startswith(" girl")
    assert "100 degrees" in water
    assert census_end.startswith(" Rome")
