import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from architectures import (
    ARCHITECTURES,
    NOT_STATIC,
    PROMPTS,
    SERVED,
    VOCABULARY,
    close,
    logits_without_cache,
    random_model,
)
from harness.config.amounts import BUCKET
from harness.local.runners.base import UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner


@pytest.mark.parametrize("name", SERVED)
def test_a_served_model_agrees_with_itself_and_is_left_alone(name: str) -> None:
    """Attention over its slots is the runner's own, within its passes."""
    model = random_model(name)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [config._attn_implementation for config in configs]
    runner = StaticRunner(model)
    runner.check()
    runner.start(PROMPTS)
    with pytest.raises(IndexError):
        runner.extend(torch.full((3, 2), VOCABULARY), list(map(len, PROMPTS)))
    assert [config._attn_implementation for config in configs] == before


def test_equal_prompts_are_read_once() -> None:
    model = random_model("llama")
    read: list[int] = []
    model.register_forward_pre_hook(
        lambda module, arguments, named: read.append(named["input_ids"].numel()), with_kwargs=True
    )
    runner = StaticRunner(model)
    prompts = [[5, 9, 23, 4, *end] for end in ([3, 7, 6], [11], [3, 7, 6])]
    runner.start(prompts)
    runner.start(prompts, alone=True)
    assert read == [2 * 7, 7, 5]


def test_logits_are_made_after_the_last_token_of_each_prompt_alone() -> None:
    """Not after all tokens, nor for each row after the last tokens of the others."""
    model = random_model("llama")
    runner = StaticRunner(model)
    numbers: list[int] = []
    head = model.lm_head
    head.register_forward_hook(lambda module, inputs, output: numbers.append(output.numel()))
    prompts = [[5, 6, 7, *row] for row in ([1, 2, 3], [4, 5, 6, 7, 8], [9])]
    logits = runner.start(prompts).logits
    assert numbers == [len(prompts) * VOCABULARY]
    assert logits.shape == (3, VOCABULARY)


@pytest.mark.parametrize("runner", ["eager", "static"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_row_at_the_end_of_its_context_beside_one_that_is_not(name: str, runner: str) -> None:
    """All rows are extended by as many tokens, of which a row keeps those within its context."""
    model = random_model(name, max_position_embeddings=32)
    runs: Any = (SnapshotRunner if runner == "eager" else StaticRunner)(model)
    texts = [[place % 50 for place in range(30)], [7, 8, 9]]
    runs.start(texts)
    tokens = torch.arange(18).view(2, 9)
    counts = (2, 9)
    logits = runs.extend(tokens, list(map(len, texts))).logits
    for row, count in enumerate(counts):
        whole = [*texts[row], *tokens[row, :count].tolist()]
        assert close(logits[row, :count], logits_without_cache(model, whole)[-count:])


@pytest.mark.parametrize("name", NOT_STATIC)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=NOT_STATIC[name]):
        StaticRunner(random_model(name)).check()


@pytest.mark.parametrize("kind", ["doge", "dots3_note_text"])
def test_masks_that_it_does_not_make_are_refused(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("an older transformers")
    sizes = {**ARCHITECTURES["llama"], "model_type": kind, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    with pytest.raises(UnsupportedModelError, match=r"makes its own masks|indexed_attention"):
        StaticRunner(model)


@pytest.mark.parametrize(
    ("window", "num_slots", "wrong"), [(8, 20, True), (200, 193, True), (200, 192, False)]
)
def test_a_window_at_the_end_of_the_cache_is_found_where_rows_exceed_it(
    window: int, num_slots: int, wrong: bool
) -> None:
    """Or where a mask does, which may end seven slots behind them."""
    model = random_model("gpt_neo", window_size=window)
    SnapshotRunner(model).check(2, num_slots)
    runner = StaticRunner(model)
    if not wrong:
        runner.check(num_slots)
        return
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        runner.check(num_slots)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon"])
def test_random_batches_in_the_same_slots(name: str) -> None:
    """Batches of any size after each other, whose rows end and keep what they like: as with the eager runner."""
    chance, model = random.Random(name), random_model(name)
    runners = StaticRunner(model), SnapshotRunner(model)

    def some(number: int, length: int) -> list[list[int]]:
        return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(number)]

    def prompts(most: int) -> list[list[int]]:
        usual = [1, 2, 9, BUCKET - 1, BUCKET]
        lengths = [chance.choice(usual) for _ in range(chance.randint(1, most))]
        return [prompt for length in lengths for prompt in some(1, length)]

    for most in (5, 3, 1, 4, 1):
        batch = prompts(most)
        # Of equal prompts one is read.
        batch = [*batch, *batch[:1]]
        alone = chance.random() < 0.5
        assert close(*(runner.start(batch, alone=alone).logits for runner in runners))
        num_rows = len(batch)
        starts: list[int | None] = [len(prompt) for prompt in batch]
        for _ in range(5):
            num_tokens = chance.choice([1, 1, 4])
            fed = torch.tensor(some(num_rows, num_tokens))
            running = [row for row, start in enumerate(starts) if start is not None]
            logits = [runner.extend(fed, starts).logits[running] for runner in runners]
            assert close(*logits)
            resting = chance.sample(running, chance.randint(0, len(running) - 1))
            starts = [
                None if start is None or row in resting else start + chance.randint(0, num_tokens)
                for row, start in enumerate(starts)
            ]
