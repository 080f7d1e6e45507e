"""The whole model, real text, a real conversation: what a user would see."""

from collections.abc import Iterator

import pytest
from checks import assert_at_rest, assert_same
from engine_process import BLOCK_TOKENS, EngineProcess, opal, running_engine
from prompts import greedy
from reference import Reference

from opal_connector.cli.models import ensure_smollm2

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TURN_TOKENS = 40  # more than a block: an answer completes one at least

LETTER = """\
Dear Marta,

You asked how the winter went at the lighthouse, so here is the whole story, from the first storm
to the day the supply boat came back. In November the wind turned to the north and stayed there for
three weeks. The sea threw stones as big as loaves over the wall, and one of them broke the window
of the pantry. Jonas nailed a board over it and said that it would hold until spring, and it did.
We had flour, beans, dried apples, two wheels of cheese and more coffee than two people can drink.
What we did not have was lamp oil. The barrel that should have lasted until March had a crack near
the bottom, and by the time we saw the dark stain on the floor half of it was gone.

So we learned to live by daylight. We got up when the sky turned grey, did the accounts and the
mending at the window, and kept what oil there was for the great lamp, because ships do not care
whether the keeper can read in the evening. I read to Jonas from memory instead. It turns out that
I know four long poems, a good part of a cookery book and most of the rules of navigation. He knows
songs, but only the first verse of each, so we made up the others.

In January a ship came too close. It was the night of the thick snow, when even the lamp could not
be seen from the landing. We heard her bell before we saw her lights. Jonas ran to the gallery and
I rang our own bell, once every ten seconds, as the book says, until my arms would not lift any
more and we changed places. She turned in time. In the morning we saw her anchored behind the
island, with ice on every rope, and her captain rowed over to thank us. He brought a barrel of oil,
a sack of oranges and a cat. The cat is grey, has one white foot, and sleeps in the flour.

In February nothing happened, and I was glad of it. I painted the stairs. I counted the steps once
more and there are still one hundred and seventy-two of them. I wrote down the weather every three
hours, and the birds, of which there were mostly gulls. When the ice broke in the bay it sounded
like someone moving furniture in the sky. Two days later the supply boat came with your letters,
all nine of them, and with the new glass for the pantry.

I have thought about what you wrote, that the post in the harbour office will be free in summer and
that I should take it. It would be good to live in a street again and to buy bread that I have not
baked. But who would count the steps? Let me stay one more winter, and then ask me again.

With love to the children, and to your mother if she still remembers me,
Anna
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with running_engine(kv_transfer_config=opal({}), model=ensure_smollm2()) as running:
        yield running


def test_a_letter_is_read_once(engine: EngineProcess, reference: Reference) -> None:
    """A question about a long text, again after the device has forgotten it."""
    chat = [{"role": "user", "content": LETTER + "\nWhat did the captain bring?"}]
    tokens = engine.call("chat_tokens", messages=chat)
    expected = reference.answer(tokens, model=ensure_smollm2(), sampling=greedy(8))

    cold = engine.ask(tokens, sampling=greedy(8))
    engine.reset_device()
    warm = engine.ask(tokens, sampling=greedy(8))

    assert_same([cold, warm], [expected] * 2)
    assert cold["cached_tokens"] == 0
    assert warm["opal"]["hit_tokens"]["CPUMemory"] == warm["cached_tokens"]
    assert warm["cached_tokens"] >= 0.95 * len(tokens)
    assert len(tokens) > 600
    assert_at_rest(engine)


def test_each_turn_of_a_chat_hits_the_answer_before(
    engine: EngineProcess, reference: Reference
) -> None:
    """Turn n+1 finds not only prompt n but what the model answered to it, without the device."""
    chat: list[dict[str, str]] = []
    known: list[int] = []
    prompt_tokens = 0
    for question, answer_tokens in (
        ("Explain in a few sentences why the sky is blue.", TURN_TOKENS),
        ("And why is it red in the evening?", TURN_TOKENS),
        ("Write one sentence that sums this up for a child.", 8),
    ):
        chat.append({"role": "user", "content": question})
        tokens = engine.call("chat_tokens", messages=chat)
        sampling = {"max_tokens": answer_tokens, "ignore_eos": False}
        answer = engine.ask(tokens, sampling=sampling)

        assert_same([answer], [reference.answer(tokens, model=ensure_smollm2(), sampling=sampling)])
        # The last token of an answer is never computed, so its KV is not there.
        assert (
            answer["cached_tokens"] == common_tokens(known, tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        )
        assert answer["cached_tokens"] > prompt_tokens or not known
        chat.append(
            {"role": "assistant", "content": engine.call("text_of", token_ids=answer["tokens"])}
        )
        known = tokens + answer["tokens"][:-1]
        prompt_tokens = len(tokens)
        engine.reset_device()
    assert_at_rest(engine)


def common_tokens(left: list[int], right: list[int]) -> int:
    """Tokens at the start of both."""
    pairs = zip(left, right, strict=False)
    differing = (place for place, (one, other) in enumerate(pairs) if one != other)
    return next(differing, min(len(left), len(right)))
