"""`recovery engine=server`: planted faults are caught, by weights or by log-probabilities, or why they cannot be."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo_server import EchoServer, Serve, serving
from harness.commands.recovery.greedy import GreedyTexts
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling, exact_probabilities
from harness.commands.recovery.scores import Scores, with_ends
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Traits
from harness.engines.requests import RequestRecord
from harness.measuring.references import ReportedReference
from harness.servers.events import AnswerError
from harness.servers.logprobs import TextScorer
from in_process import QUICK_MODELS, Harness, results
from planted_faults import planted
from real_servers import gguf_pair, llama_serving
from served import served
from some_settings import settings_of

ANY = ["engine=server", "num_prompts=1", "temperature=1", "shift=0.5", "false_alarm_rate=1e-6"]
ANY += ["samplings=[as_asked]"]
QUICK = [*ANY, "model=tiny_draft", "batch_size=16", "tokens=8", "K=1"]
SCORED = [*ANY, "model=tiny", "batch_size=4", "tokens=16", "reference=regular"]


def refuse(*_: Any, **__: Any) -> Any:
    raise RunError("too large")


@pytest.mark.slow
def test_a_fault_of_the_server_is_caught_by_its_weights(harness: Harness, tmp_path: Path) -> None:
    planted_engine = f"engine={planted('BonusFromWrongPosition')}"
    faulty = [*QUICK_MODELS, "runner=eager", planted_engine]
    with served(tmp_path, *faulty) as url:
        servers = [f"engine.url={url}/v1", f"engine.regular_url={url}/regular/v1"]
        outcome = harness("recovery", *QUICK, "num_draws=200", *servers, code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.parametrize("is_ignored", [False, True], ids=["kept to", "ignored in bursts"])
def test_texts_beside_a_grammar_are_the_regular_servers(
    harness: Harness, serve: Serve, is_ignored: bool
) -> None:
    """What the echo servers write stands for what a grammar allows: the model alone would have other texts."""
    # lmdeploy #4551: only the first token is decided outside of speculation.
    regular = EchoServer()
    server = EchoServer(stride=2 if is_ignored else 1, num_draft_tokens=4)
    grammar = "engine.extra={response_format: {type: json_object}}"
    servers = serve(regular, server)
    code = 3 if is_ignored else 0
    harness("recovery", *QUICK, "temperature=0", grammar, *servers, code=code)
    asked = regular.bodies + server.bodies
    assert all(body["response_format"] == {"type": "json_object"} for body in asked)
    (row,) = results("recovery").to_dict("records")
    assert row["verdict"] == ("undecided" if is_ignored else "lossless")
    assert (row["identical_prompts"] < row["num_prompts"]) == is_ignored


@pytest.mark.parametrize(
    ("dialect", "has_weights", "top_logprobs", "greedy_verdict"),
    [
        ("vllm", False, -1, "lossless"),
        # The letters that it answers with are not the texts that the weights write.
        ("sglang", True, 20, "lossy"),
    ],
)
def test_drawn_texts_without_log_probabilities_are_undecided(
    harness: Harness,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Any,
    has_weights: bool,
    top_logprobs: int,
    greedy_verdict: str,
) -> None:
    """Greedy texts are still compared."""
    if not has_weights:
        monkeypatch.setattr("harness.local.engine.pair.plan_pair", refuse)
    # A server like vLLM, here without log-probabilities of prompts.
    servers = serve(EchoServer(dialect=dialect), EchoServer(dialect=dialect))
    code = 1 if greedy_verdict == "lossy" else 3
    outcome = harness("recovery", *QUICK, f"top_logprobs={top_logprobs}", *servers, code=code)
    greedy, reference = results("recovery").to_dict("records")
    assert (greedy["check"], greedy["verdict"]) == ("greedy", greedy_verdict)
    assert greedy["num_prompts"] == 4
    assert (reference["check"], reference["verdict"]) == ("reference", "undecided")
    advice = f"vLLM (with --max-logprobs={top_logprobs}) and llama.cpp send both"
    assert advice in reference["finding"]
    assert (advice in outcome.complaint) == (greedy_verdict == "lossless")
    # Lossy against another model is said so.
    weights = "compared with the weights of tiny_draft, and the servers name tiny"
    assert (weights in outcome.complaint) == (greedy_verdict == "lossy")


@pytest.mark.parametrize("chat", [True, False])
def test_one_server_without_a_reference_says_how_to_give_one(
    harness: Harness, serve: Serve, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr("harness.local.engine.pair.plan_pair", refuse)
    [url] = serve(EchoServer(dialect="openai"))
    asked = ["recovery", *QUICK, "temperature=0", url, f"engine.chat={chat}"]
    complaint = harness(*asked, code=3).complaint
    assert "give a server of the same model" in complaint
    reason = (
        "could not predict the answers with engine.chat=true" if chat else "whose weights load here"
    )
    assert reason in complaint
    (row,) = results("recovery").to_dict("records")
    assert (row["check"], row["verdict"]) == ("reference", "undecided")


def test_a_text_that_ends_with_an_end_token_is_whole() -> None:
    """A server may end a text there although ignore_eos was asked of it."""
    ended = RequestRecord(0, 1, token_ids=[5, 6, 2], num_tokens=3)
    greedy = Sampling("greedy", DecodingSettings(temperature=0.0))
    for num_asked, end_tokens, num_cut_short in ((8, (), 1), (8, (2,), 0), (3, (), 0)):
        texts = GreedyTexts(frozenset(end_tokens))
        texts.add(None, PlannedRequest((1,), greedy, num_asked, 0), ended)
        assert texts.num_cut_short == num_cut_short
    # Where it may end, it must not go on.
    for ends, verdict in (({2}, "lossless"), ({6}, "lossy")):
        planned = PlannedRequest((1,), greedy, 8, 0, ends=frozenset(ends))
        assert with_ends({"verdict": "lossless"}, [Answer(planned, ended)])["verdict"] == verdict


ASKED = ["recovery", "engine=server", "model=tiny_draft", "decoding=greedy"]
ASKED += ["decoding.max_new_tokens=8", "num_prompts=4", "batch_size=2"]


def test_a_model_that_nobody_named_is_looked_up_nowhere(harness: Harness) -> None:
    server = EchoServer(models={"somebody/model": None}, num_draft_tokens=4)
    typed = [word for word in ASKED if not word.startswith("model=")]
    with serving(server) as address:
        outcome = harness(*typed, f"engine.url={address}", "chat=false", code=3)
    assert "no exact distribution: the weights that are served are not known" in outcome.stderr
    assert "cannot be loaded here" not in outcome.stderr


def test_a_server_that_takes_one_name_of_its_model(harness: Harness, serve: Serve) -> None:
    """What is sent where no name is known is refused: the advice is to name the model."""
    pinned = [EchoServer(models={}, refuses=("model",)) for _ in range(2)]
    servers = serve(*pinned)
    typed = [word for word in ASKED if not word.startswith("model=")]
    outcome = harness(*typed, *servers, code=1)
    assert "served is a placeholder: engine.model= sets the name" in outcome.stderr


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
        harness("recovery", *SCORED, "num_draws=500", *arms(f"{honest}/v1", f"{regular}/v1"))
        asked = ["num_draws=300", *arms(f"{faulty}/v1", f"{regular}/v1")]
        wrong = harness("recovery", *SCORED, *asked, code=1)
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
    servers = [EchoServer(**told), EchoServer(**told, num_draft_tokens=4)]
    code = 0 if verdict == "lossless" else 3
    outcome = harness("recovery", *SCORED, "num_draws=300", *serve(*servers), code=code)
    rows = results("recovery")
    assert rows["verdict"][0] == verdict
    if code:
        assert outcome.complaint.startswith("undecided: the regular server is no reference")
        assert list(rows["check"]) == ["reference"]


@pytest.mark.parametrize(
    ("shown", "complaint"),
    [
        ([0.0, 0.0], "make 2 together at one position, more than 1"),
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
    scores = [[dict(zip((3, 7), shown, strict=True))]]
    arm = SimpleNamespace(scores=lambda *_: scores, traits=Traits())
    reference = ReportedReference(arm, [1], 8, 2, 1)
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
    reference = ReportedReference(arm, [1], 60, num_top, 1)
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
    assert checks["honest"] != "lossy"
    if temperature == 1.0 or num_top < 0:
        assert checks["shifted"] == "lossy"


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
