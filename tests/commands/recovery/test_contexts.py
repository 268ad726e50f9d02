"""Where draws begin: the place of each prompt that a recovered token decides most, against chains done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from harness.commands.recovery.contexts import (
    CONTEXT_TOKENS,
    NUM_CONTEXTS,
    Context,
    choose_contexts,
    recovered_entropy,
)
from harness.config.settings import DecodingSettings
from table_engine import TableEngine

# A context that ends with 0 most likely goes on with 1, behind which the draft is sure of what the target is not. All
# other contexts most likely go on with 0, behind which the two agree.
TARGET = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.3, 0.2], [0.6, 0.0, 0.4]])
DRAFT = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


ENGINE = TableEngine(TARGET, DRAFT)
DECODING = DecodingSettings(temperature=1.0)


def test_what_is_left_to_the_recovered_token() -> None:
    after_0, after_1, after_2 = recovered_entropy(
        ENGINE, [[2, 0], [1], [0, 1, 2]], DECODING
    ).tolist()
    # Rejected in 0.8 of the cases, and then 5/8 against 3/8, where 1 came first.
    assert after_0 == pytest.approx(
        0.9 * 0.8 * -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(3 / 8))
    )
    assert after_1 == 0
    assert after_2 == 0


def test_a_draft_that_does_not_draw_is_rejected() -> None:
    after_0, _, _ = recovered_entropy(
        TableEngine(TARGET), [[2, 0], [1], [0, 1, 2]], DECODING
    ).tolist()
    assert after_0 == pytest.approx(0.9 * -sum(p * math.log(p) for p in (0.5, 0.3, 0.2)))


def test_each_prompt_is_cut_at_its_best_place() -> None:
    contexts = choose_contexts(ENGINE, [[2, 1, 0, 2, 2], [1, 2, 0, 1]], DECODING)
    assert contexts == [Context(0, 3, (2, 1, 0)), Context(1, 3, (1, 2, 0))]


def test_prompts_that_begin_alike_are_cut_at_different_places() -> None:
    contexts = choose_contexts(ENGINE, [[1, 0, 2, 0], [1, 0, 2], [1, 0, 2, 0]], DECODING)
    assert [context.prompt_index for context in contexts] == [0, 2, 1], "the most open ones first"
    assert {context.token_ids for context in contexts[:2]} == {(1, 0), (1, 0, 2, 0)}
    assert len({context.token_ids for context in contexts}) == 3
    # What has no other place is not drawn from twice.
    assert choose_contexts(ENGINE, [[0], [0]], DECODING) == [Context(0, 1, (0,))]


def test_a_few_prompts_are_enough() -> None:
    prompts = [[1, *[2] * length, last] for length in range(4) for last in (2, 0)]
    contexts = choose_contexts(ENGINE, prompts, DECODING)
    assert len(contexts) == NUM_CONTEXTS
    assert [context.token_ids[-1] for context in contexts[:4]] == [0] * 4


def test_a_long_prompt_is_read_in_part() -> None:
    prompt = [0, *[2] * 100, 0, 2]
    (context,) = choose_contexts(ENGINE, [prompt], DECODING)
    assert context.end == 102
    assert len(context.token_ids) == CONTEXT_TOKENS
    assert context.token_ids[-1] == 0
