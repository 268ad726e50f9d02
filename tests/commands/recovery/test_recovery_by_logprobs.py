"""`recovery reference=regular`: a server's log-probabilities in place of weights."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo_server import EchoServer, Serve
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling, exact_probabilities
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Traits
from harness.engines.requests import RequestRecord
from harness.measuring.references import ReportedReference
from harness.results.statistics.drawn_tokens import NO_ROUNDING
from harness.servers.events import AnswerError
from harness.servers.logprobs import TextScorer
from in_process import Harness, results
from real_servers import gguf_pair, llama_serving
from some_settings import settings_of

QUICK = ["model=tiny", "engine=server", "batch_size=4", "num_prompts=1", "tokens=16"]
QUICK += ["temperature=1", "shift=0.5", "false_alarm_rate=1e-6"]
QUICK += ["reference=regular", "samplings=[as_asked]"]


def arms(url: str, regular_url: str) -> list[str]:
    return [f"engine.url={url}", f"engine.regular_url={regular_url}"]


@pytest.mark.slow
def test_real_servers_are_told_lossless_or_not(harness: Harness) -> None:
    """llama.cpp's, of which the second time one has the draft's weights under the target's name."""
    model, draft = gguf_pair()
    common = ["-c", "4096", "-np", "4", "--alias", "tiny"]
    drafts = ["-md", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
    with (
        llama_serving(model, *common) as regular,
        llama_serving(model, *common, *drafts) as honest,
        llama_serving(draft, *common) as faulty,
    ):
        harness("recovery", *QUICK, "num_draws=500", *arms(f"{honest}/v1", f"{regular}/v1"))
        asked = ["num_draws=300", *arms(f"{faulty}/v1", f"{regular}/v1")]
        wrong = harness("recovery", *QUICK, *asked, code=1)
    assert wrong.complaint.startswith("lossy: ")
    rows = results("recovery")
    assert rows["verdict"][0] == "lossless"
    assert {"reference", "greedy", "sampled"} <= set(rows["check"])


@pytest.mark.parametrize(("stride", "verdict"), [(1, "lossless"), (2, "undecided")])
def test_a_server_whose_texts_are_not_those_of_its_log_probabilities_is_no_reference(
    harness: Harness, serve: Serve, stride: int, verdict: str
) -> None:
    """As vLLM gives them, in one answer for a whole text."""
    bodies: list[dict[str, Any]] = []
    told = {"version": "0.32.0", "stride": stride, "scored_stride": 1, "bodies": bodies}
    servers = [EchoServer(**told) for _ in range(2)]
    code = 0 if verdict == "lossless" else 3
    outcome = harness("recovery", *QUICK, "num_draws=300", *serve(*servers), code=code)
    rows = results("recovery")
    assert rows["verdict"][0] == verdict
    if code:
        assert outcome.complaint.startswith("undecided: the regular server is no reference")
        assert list(rows["check"]) == ["reference"]


@pytest.mark.parametrize(
    ("shown", "complaint"),
    [
        ([0.0, 0.0], "make 2 together at one place, more than 1"),
        ([5.0], "make 148 together"),
        ([-0.7, math.nan], "are no numbers"),
        ([-math.inf, -0.1], "are no numbers"),
        (["a"], "are no numbers"),
        ([], "0 log-probabilities|1 log-probabilities"),
        ([-0.69, -0.7], ""),
        ([0.001, -9999.0], ""),
    ],
)
def test_log_probabilities_that_cannot_be_are_refused(
    shown: list[Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0 each, all tokens would tie, and any text would be within rounding."""
    asked: Any = None
    scorer = TextScorer(asked, asked, 20)

    async def score(*_: Any) -> list[Any]:
        return [dict(enumerate(shown))]

    monkeypatch.setattr(TextScorer, "_score", score)
    if complaint:
        with pytest.raises(AnswerError, match=complaint):
            asyncio.run(scorer._checked([1], [2]))
    else:
        assert asyncio.run(scorer._checked([1], [2])) == [dict(enumerate(shown))]


class Showing:
    """A regular server that shows the likeliest of 60 tokens, and the text's own."""

    traits = Traits()

    def __init__(self, probabilities: np.ndarray, num_top: int) -> None:
        self._logprobs = np.log(probabilities)
        self._num_top = num_top

    def scores(self, texts: list, num_top: int, num_in_flight: int) -> list:
        found = []
        for _, text in texts:
            text_scores = []
            for place, token in enumerate(text):
                row = self._logprobs[place % len(self._logprobs)]
                shown = {*np.argsort(-row)[: self._num_top].tolist(), token}
                text_scores.append({each: float(row[each]) for each in shown})
            found.append(text_scores)
        return found


def test_tokens_that_are_not_shown_share_what_is_left_or_are_as_likely_as_the_last() -> None:
    """Two of 8 tokens are shown, at 0.5 and 0.1. The other 0.4 is 6 times 0.0667, or 4 times 0.1 and nothing twice."""
    shown = [math.log(0.5), math.log(0.1)]
    arm = SimpleNamespace(
        scores=lambda *_: [[dict(zip((3, 7), shown, strict=True))]], traits=Traits()
    )
    reference = ReportedReference(arm, [1], 8, 2, 1)  # type: ignore[arg-type]
    [[even]] = np.exp(reference.logits_along([[1]], [[3]]))
    [uneven] = np.exp(reference.logits_by_another_route([1], [3]))
    assert even == pytest.approx([0.4 / 6] * 3 + [0.5] + [0.4 / 6] * 3 + [0.1])
    assert sorted(uneven) == pytest.approx([0, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5])


@pytest.mark.parametrize(
    ("temperature", "top_p", "num_top"), [(1.0, 1.0, 6), (1.7, 0.7, 6), (0.6, 0.7, -1)]
)
def test_quantiles_in_the_likeliest_tokens_raise_no_false_alarm(
    temperature: float, top_p: float, num_top: int
) -> None:
    """With 6 or all of 60 tokens shown, at any temperature and truncation; a shift is found all the same."""
    generator = np.random.default_rng(3)
    rows = generator.dirichlet(np.full(60, 0.15), size=16)
    arm = Showing(rows, num_top if num_top > 0 else 60)
    reference = ReportedReference(arm, [1], 60, num_top, 1)  # type: ignore[arg-type]
    sampling = Sampling("any", DecodingSettings(temperature=temperature, top_p=top_p))
    exact = sampling.probabilities_along(np.log(rows))
    settings = settings_of(RecoverySettings, false_alarm_rate=0.01, shift=0.1, batch_size=8)
    asking = Asking(settings, [], [sampling], frozenset())
    checks = {}
    for name in ("honest", "shifted"):
        drawn_from = exact if name == "honest" else 0.6 * exact + 0.4 / 60
        answered = []
        for number in range(300):
            text = [int(generator.choice(60, p=row / row.sum())) for row in drawn_from]
            planned = PlannedRequest((number % 60, number // 60), sampling, len(text), number)
            answered.append(Answer(planned, RequestRecord(number, 1, token_ids=text)))
        scores = Scores(reference, asking)
        scores.add(answered)
        checks[name] = scores.sampled().verdict
        texts = [scored.text for scored in scores.drawn]
        checks[f"{name} but for rounding"] = asking.token_test.check(
            texts, [NO_ROUNDING] * 300
        ).verdict
    assert checks["honest"] != "lossy"
    if temperature == 1.0 or num_top < 0:
        assert checks["shifted"] == "lossy"
        if top_p == 1.0 or num_top < 0:
            # Nothing is unknown there; which unknown token is the last within top-p is.
            assert checks["honest but for rounding"] == "lossless"


def test_what_came_with_drawn_tokens_shows_rounding() -> None:
    """The kernels that draw may differ from those that score; others than the model's own show nothing."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(16, 8))
    own = np.log(exact_probabilities(logits, DecodingSettings(temperature=1.0)))[:, 3]
    for came, rounding in ((own + 0.004, 0.004), (1.5 * own, 0.0), ([None] * 16, 0.0)):
        asking = Asking(settings_of(RecoverySettings), [(1,)], [], frozenset())
        scores = Scores(SimpleNamespace(), asking)
        record = RequestRecord(0, 1, token_ids=[3] * 16, num_tokens=16, logprobs=list(came))
        scores._note_logprobs(record, logits)
        assert scores.rounding_of_drawn() == pytest.approx(rounding, abs=1e-9)
