"""The engine with a clock of its own: what is planted is what the page says, through the whole command."""

import sys
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.record import ENGINES
from in_process import Harness, results
from some_questions import question_of

SIMULATED: Any = sys.modules[type(ENGINES["simulated"]).__module__]
QUIET = ["engine=simulated", "engine.noise=0", "engine.prompts_differ=0", "resume=false"]
# No wait for a first token, so that a speed-up is tokens over the cost of an iteration.
BARE = ["engine.prompt_ms=0", "engine.first_ms=0"]
ALWAYS = "engine.acceptance=1"


def speculative(harness: Harness, *settings: str, **options: Any) -> dict[Any, Any]:
    harness("latency", *settings, **options)
    return dict(results().iloc[-1])


def test_a_planted_speedup_of_1_7_is_1_7_on_the_page(harness: Harness) -> None:
    """Five tokens in 4 × 5 + 20 + 4 × 4.69 = 58.8 ms, where five regular steps take 100 ms."""
    costs = ["engine.step_ms=20", "engine.draft_ms=5", "engine.width_ms=4.7059", ALWAYS]
    # 1 token with the prompt, and 64 iterations of 5.
    outcome = harness("latency", *QUIET, *BARE, *costs, "K=4", "tokens=321", "num_prompts=8")
    assert "1.70× faster" in outcome.stdout
    assert "100 % accepted: 5.0 tokens per iteration" in outcome.stdout
    share = 100 * 20 / (4 * 5 + 20 + 4 * 4.7059)
    assert f"a regular step takes {share:.0f} % of an iteration" in " ".join(outcome.stdout.split())


def test_a_batch_takes_what_its_passes_cost() -> None:
    """Three answers, two in flight. The third begins when these have ended, at 100 ms. Each iteration stalls 1 ms."""
    costs = {"step_ms": 20, "width_ms": 1, "row_ms": 5, "draft_ms": 3, "first_ms": 10}
    stalls = {"stall_every": 1, "stall_ms": 1, "jumps": {3: 7.0}}
    undisturbed = {"acceptance": 1.0, "prompts_differ": 0, "noise": 0}
    settings = SIMULATED.SimulatedSettings(prompt_ms=1, **costs, **stalls, **undisturbed)
    decoding = DecodingSettings(max_new_tokens=6, num_draft_tokens=2)
    question = question_of([[1] * 2, [1] * 4, [1] * 3], decoding)
    arm = SIMULATED.SimulatedArm("speculative", settings, SIMULATED._Clock())
    answered = arm.answer(question.requests, 2)
    # Prompts of 12 and 14 ms, then 2 · 3 + 20 + 5 + 4 + 7 ms, and 3 + 20 + 5 + 2 ms.
    expected = [[0.012, 0.069, 0.100], [0.026, 0.069, 0.100], [0.013, 0.049, 0.074]]
    for record, arrivals in zip(answered.requests, expected, strict=True):
        assert record.arrivals == pytest.approx(arrivals)
        assert (record.outcomes, record.num_tokens) == ([(2, 2), (1, 1)], 6)
    assert answered.seconds == pytest.approx(0.174)
    assert answered.load.request_seconds == pytest.approx(0.100 + 0.100 + 0.074)
    assert (answered.load.share, answered.load.extra) == (1, [])


def test_wrong_settings() -> None:
    for name, wrong, rule in [
        ("step_ms", 0.0, "must be at least 1e-6"),
        ("noise", -0.1, "must be from 0 to 10"),
        ("drift", 100.1, "must be from 0 to 100"),
        ("acceptance", 1.2, "must be from 0 to 1"),
        ("acceptance", (), "must have a rate"),
        ("lengths", (0,), "must be at least 1"),
        ("jumps", {0: 1.0}, "by width, from 1 on"),
        ("jumps", {1: -1.0}, "by width, from 1 on"),
    ]:
        with pytest.raises(SettingError, match=f"{name}=.*{rule}"):
            SIMULATED.SimulatedSettings(**{name: wrong})
        SIMULATED.SimulatedSettings(acceptance=(0.0, 1.0), jumps={1: 0.0}, lengths=(1,), noise=10)
