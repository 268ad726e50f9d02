"""The cost of a proposal of `lookup` and of `suffix` on a long context, over a step of the target there.

    python benchmarks/ngrams.py [--context 10000] [--turns 30] [--tokens 4]

The context is in the tiny model's language, which repeats itself, so that n-grams are found. A turn is what happens in
an iteration: propose K tokens, and take in those that were kept. The targets are the tiny model and a random Llama with
110 million parameters. All take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import islice

import common
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
)

from harness.decoding.protocols import Drafter, Step
from harness.drafting.methods.lookup import LookupText
from harness.drafting.methods.suffix import SuffixSettings, SuffixTexts
from harness.drafting.text import TextDrafter
from harness.menu.names import PACKAGE
from recipes.tiny_pair.language import END_OF_TEXT, documents

TINY = PACKAGE / "models" / "shipped" / "tiny"
UNUSED = Step(torch.empty(0))


def text_of(length: int) -> list[int]:
    """Token ids of texts of the tiny language."""
    texts = (
        text.removesuffix(END_OF_TEXT) for text in documents(seed=1, products=0.2, additions=0.2)
    )
    token_ids: list[int] = AutoTokenizer.from_pretrained(TINY)(
        "\n".join(islice(texts, length // 50))
    )["input_ids"]
    assert len(token_ids) >= length
    return token_ids[:length]


def drafting(drafter: Drafter, text: list[int], context: int, most: int) -> Callable[[int], float]:
    """Seconds of a proposal of `most` tokens and of what follows it: as many are kept as the text has too."""
    drafter.start([text[: context - 1]], [text[context - 1]], UNUSED)
    place = context

    def turn(_: int) -> float:
        nonlocal place
        kept = 0

        def propose() -> None:
            nonlocal kept
            proposed = drafter.propose(most, torch.empty(0)).tokens[0].tolist()
            kept = next(
                (i for i, token in enumerate(proposed) if token != text[place + i]), len(proposed)
            )
            drafter.observe([kept], [text[place + kept]], UNUSED)

        seconds = common.timed(propose)
        place += kept + 1
        return seconds

    return turn


def step(model: PreTrainedModel, context: int) -> Callable[[int], float]:
    """Seconds of a forward pass over one token after a context of random keys and values."""
    config, cache = model.config, DynamicCache()
    shape = 1, config.num_key_value_heads, context, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)

    def turn(_: int) -> float:
        with torch.inference_mode():
            seconds = common.timed(
                partial(model, input_ids=torch.tensor([[7]]), past_key_values=cache)
            )
            cache.crop(-1)
        return seconds

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_numbers(parser, context=10_000, turns=30, tokens=4)
    options = parser.parse_args()
    text = text_of(options.context + (options.turns + 2) * (options.tokens + 1))
    size = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    larger = AutoModelForCausalLM.from_config(
        LlamaConfig(**size, vocab_size=32_000, tie_word_embeddings=True)
    )
    models = {
        "the tiny model": AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
        "110 million": larger,
    }
    suffix_texts = SuffixTexts(SuffixSettings(name="suffix", method="suffix"))
    drafters = {
        "lookup": TextDrafter(lambda: LookupText(max_ngram=3, min_ngram=1)),
        "suffix": TextDrafter(suffix_texts.new, begin_batch=suffix_texts.begin_batch),
    }
    begun = {
        name: drafting(drafter, text, options.context, options.tokens)
        for name, drafter in drafters.items()
    }
    steps = {name: step(model, options.context) for name, model in models.items()}
    found = common.take_turns(begun | steps, range(options.turns))
    ratios = [
        (drafter, target, common.ratio(found[drafter], found[target]))
        for drafter in begun
        for target in steps
    ]
    common.show(
        f"{options.turns} turns after {options.context:,} tokens, {common.versions()}",
        ["proposes", "target", "turn over a step", "95 % interval"],
        [
            [drafter, target, f"{one.estimate:.4f}", common.interval(one, 4)]
            for drafter, target, one in ratios
        ],
    )


if __name__ == "__main__":
    main()
