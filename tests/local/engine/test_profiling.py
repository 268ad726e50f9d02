"""What the profile of an arm is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from harness.config.settings import DecodingSettings, ModelSettings
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.local.engine.engine import LocalEngine
from harness.local.engine.profiling import profile_arms
from loaded_pairs import load
from loops import records_of


def test_tokens_behind_the_end_of_a_text_are_not_counted(
    save_model: Callable[..., ModelSettings], tmp_path: Path
) -> None:
    decoding = DecodingSettings(max_new_tokens=12, temperature=0)
    pair = load(save_model(num_hidden_layers=1))
    engine = LocalEngine(pair, Preparation(decoding=decoding, runner="eager", batch_size=1))
    question = Question([[40, 50, 60]], decoding, seed=0, indices=[0])
    tokens = [record.tokens[0][0] for record in records_of(engine.arms[0], question.requests)]
    end = next(place for place in range(1, 7) if tokens[place] not in tokens[:place])
    for stop_tokens, number in (frozenset(), 8), (frozenset([tokens[end]]), end + 1):
        asked = dataclasses.replace(question, stop_tokens=stop_tokens)
        [profile] = profile_arms(engine.arms, pair.devices, asked, tmp_path)
        assert (profile.num_tokens, profile.num_iterations) == (number, number - 1)
    engine.close()
