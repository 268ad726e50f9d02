import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chains import records_of, row_steps, texts
from harness.config.demand import Demand
from harness.config.errors import RunError, SettingError
from harness.config.run import RunnerName
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
)
from harness.engines.record import Preparation
from harness.local.drafting.method import Pair
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import PlacedPair, plan_pair
from harness.local.engine.records import Local
from harness.local.engine.reference import not_finite
from harness.local.models.fit import fit
from harness.measuring.prompts import sets
from harness.results.drafts import Drafts
from some_questions import question_of
from tiny_checkpoints import as_draft, load, on_gpu, shipped
from traced import run_as_traced

DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=3)
PROMPTS = [[40, 50, 60], [70, 80, 90, 100, 110]]


QUESTION = question_of(PROMPTS, DECODING)


@pytest.fixture
def pair(save_model: Callable[..., ModelSettings]) -> Pair:
    draft = save_model("gpt2", n_layer=1, vocab_size=320, n_positions=64)
    return load(save_model(num_hidden_layers=1, max_position_embeddings=64), draft)


def open_engine(pair: Pair, runner: RunnerName) -> LocalEngine:
    return LocalEngine(
        pair,
        Preparation(decoding=DECODING, runner=runner, batch_size=2, longest_prompt=5, say=print),
    )


def texts_of(engine: LocalEngine) -> dict[str, list[list[list[int]]]]:
    return {
        arm.name: [row_step.tokens for row_step in row_steps(records_of(arm, QUESTION.requests))]
        for arm in engine.arms
    }


@pytest.mark.parametrize("runner", ["auto", "static"])
def test_each_runner_writes_the_same(pair: Pair, runner: RunnerName) -> None:
    eager, engine = open_engine(pair, "eager"), open_engine(pair, runner)
    assert (eager.runner, engine.runner) == ("eager", "static")
    assert texts_of(engine) == texts_of(eager)


def test_a_gpu_writes_the_same(pair: Pair, gpus: Any) -> None:
    """On a GPU, or a pretended one; recovery reads the exact distribution there."""
    found = []
    runners: list[RunnerName] = ["eager", "static"]
    for one, runner in zip([pair, on_gpu(pair)], runners, strict=True):
        engine = open_engine(one, runner)
        assert engine.runner == runner
        logits = engine.weights.reference.logits_along(PROMPTS[:1], [[7, 8, 9]])
        found.append((texts_of(engine), logits))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


def hold_in_8_bit(pair: Pair, gpus: Any) -> None:
    pair.target.model.is_loaded_in_8bit = True


def read(*_: Any) -> None:
    float(torch.ones(1, device="cuda:0"))


def read_in_the_target(pair: Pair, gpus: Any) -> None:
    pair.target.model.register_forward_hook(read)


def read_in_the_draft(pair: Pair, gpus: Any) -> None:
    pair.draft.model.register_forward_hook(read)


def fail_in_a_capture(pair: Pair, gpus: Any) -> None:
    def fail(*_: Any) -> None:
        if gpus.graph is not None:
            raise RuntimeError("operation not permitted")

    pair.draft.model.register_forward_hook(fail)


def let_the_draft_make_positions(pair: Pair, gpus: Any) -> None:
    pair.draft.model.config.alibi = True


FAILURES: dict[str, tuple[Callable[[Pair, Any], None], str]] = {
    "8 bit": (hold_in_8_bit, "is held in 8 bit"),
    "target": (
        read_in_the_target,
        "llama cannot be captured: it reads a value (test_local.py, line",
    ),
    "draft": (read_in_the_draft, "gpt2 cannot be captured: it reads a value (test_local.py, line"),
    "in a capture": (fail_in_a_capture, "gpt2 cannot be captured: RuntimeError: operation failed"),
    "eager draft": (let_the_draft_make_positions, "it runs with runner=eager"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_one_arm_cannot_have_neither_has(
    name: str, pair: Pair, gpus: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if gpus is None:
        pytest.skip("fails as a pretended GPU can")
    spoil, words = FAILURES[name]
    expected = texts_of(open_engine(pair, "eager"))
    moved = on_gpu(pair)
    spoil(moved, gpus)
    engine = open_engine(moved, "static")
    assert words in capsys.readouterr().out
    assert engine.runner == "static, no graphs"
    assert engine.is_spent == (name == "in a capture")
    assert texts_of(engine) == expected
    gpus.counts.clear()
    answered = engine.arms[-1].answer(QUESTION.requests, 2)
    assert not gpus.counts["replay"]
    assert not answered.phases.knows_host
    engine.close()


def test_a_model_that_cannot_have_the_runner_gets_the_eager_one(
    save_model: Callable[..., ModelSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    bloom = save_model("bloom", hidden_size=32, n_layer=1, n_head=4)
    pair = load(bloom, save_model(num_hidden_layers=1))
    engine = open_engine(pair, "static")
    assert (engine.runner, engine.draft_runner) == ("eager", "static")
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "runner=eager" in line]
    assert said.endswith("bloom accepts no positions; it runs with runner=eager")
    assert texts_of(engine) == texts_of(open_engine(pair, "eager"))


def test_what_cannot_be_compiled_runs_without_and_says_so(
    save_model: Callable[..., ModelSettings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails where a call is traced."""
    run_as_traced(monkeypatch)
    # A configuration that no other test compiles: the code of one serves all models of the same configuration.
    draft = save_model("gpt2", n_layer=1, vocab_size=320, layer_norm_epsilon=1e-3)
    pair = load(save_model(num_hidden_layers=1), draft)
    expected = texts_of(open_engine(pair, "eager"))
    norm = pair.draft.model.transformer.ln_f
    original = norm.forward
    norm.forward = lambda states: original(states) * (1 if states.sum().item() else 2)
    engine = open_engine(pair, "compiled")
    assert (engine.runner, engine.draft_runner) == ("compiled", "static")
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "it runs with" in line]
    assert said.endswith("it runs with runner=static")
    assert texts_of(engine) == expected


# With four draft tokens: far more than an untrained head, less than the model card says.
@pytest.mark.parametrize(
    ("head", "least"), [("tiny_eagle3", 3.5), ("tiny_dflash", 2.5), ("tiny_medusa", 2.5)]
)
def test_shipped_heads_draft_well_and_change_no_text(head: str, least: float) -> None:
    target, draft = shipped("tiny", head)
    pair = load(target, as_draft(draft))
    decoding = DecodingSettings(max_new_tokens=16, num_draft_tokens=4, temperature=0)
    file = Path(sets.__file__).with_name("prompt_sets") / "tiny.jsonl"
    prompts = sets.load_prompts(PromptSettings(name="tiny", file=str(file))).take(3)
    question = question_of([pair.tokenizer(one.text)["input_ids"] for one in prompts], decoding)
    engine = LocalEngine(pair, Preparation(decoding=decoding, runner="eager", batch_size=3))
    regular, speculative = (arm.answer(question.requests, 3) for arm in engine.arms)
    assert speculative.tokens == regular.tokens
    drafts = Drafts.total(each.as_drafts for each in speculative.requests)
    assert drafts.columns()["mean_acceptance_length"] > least


def test_stopwatches_count_every_pass(pair: Pair) -> None:
    engine = open_engine(pair, "eager")
    regular, speculative = engine.arms
    for _ in range(2):  # each question by itself
        answered = regular.answer(QUESTION.requests, len(QUESTION.prompts))
        assert answered.batch.num_iterations == 11
        assert answered.phases.calls == {"prompts": 1, "forward": 11, "host": 10}
    answered = speculative.answer(QUESTION.requests, len(QUESTION.prompts))
    arrivals = answered.arrivals
    num_iterations = answered.batch.num_iterations
    assert len({arrival.seconds for arrival in arrivals}) == num_iterations + 1
    # The last turn may have nothing to draft.
    num_drafted = len({arrival.seconds for arrival in arrivals if arrival.proposed})
    assert num_iterations - 1 <= num_drafted
    counts = {"prompts": 1, "forward": num_iterations, "drafting": num_drafted}
    counts["host"] = num_iterations - 1
    assert answered.phases.calls == counts


@pytest.mark.parametrize(("role", "value"), [("model", float("nan")), ("draft", float("inf"))])
def test_logits_that_are_not_finite_are_an_error(pair: Pair, role: str, value: float) -> None:
    broken = pair.target if role == "model" else pair.draft
    with torch.no_grad():
        broken.model.get_output_embeddings().weight[7] = value
    engine = open_engine(pair, "eager")
    for arm in engine.arms[0 if role == "model" else 1 :]:
        with pytest.raises(
            RunError, match=rf"{role}: .* nan or infinite .* at new token \d+ of prompt \d"
        ):
            list(records_of(arm, QUESTION.requests))
    if role == "model":
        with pytest.raises(RunError, match="at token 3 of prompt and text"):
            engine.weights.reference.logits_along(PROMPTS, [[0], [0]])


@pytest.mark.parametrize("runner", ["eager", "static"])
def test_logits_that_are_not_finite_end_an_answer_and_not_the_next(
    pair: Pair, runner: RunnerName
) -> None:
    broken = 7
    with torch.no_grad():
        pair.target.model.get_input_embeddings().weight[broken] = torch.nan
    engine = open_engine(pair, runner)
    sound, other = QUESTION.requests
    overflowing = dataclasses.replace(other, prompt=[*other.prompt, broken])
    for arm in engine.arms:
        alone = texts(records_of(arm, [sound, other]), 2)
        with pytest.raises(RunError, match=r"model: .* nan or infinite .* new token 0 of prompt 1"):
            arm.answer([sound, overflowing], 2)
        assert texts(records_of(arm, [sound, other]), 2) == alone


@pytest.mark.parametrize(
    ("role", "dtype", "advice"),
    [
        ("model", torch.float16, "try model.dtype=bfloat16 or float32, or check its weights"),
        ("draft", torch.bfloat16, "try draft.dtype=float32, or check its weights"),
        ("draft", torch.float32, "at new token 0; check its weights"),
    ],
)
def test_the_advice_is_a_format_with_more_room(
    pair: Pair, role: str, dtype: torch.dtype, advice: str
) -> None:
    name = "target" if role == "model" else role
    held = dataclasses.replace(getattr(pair, name), dtype=dtype)
    pair = dataclasses.replace(pair, **{name: held})
    assert str(not_finite(pair, role, "new token 0")).endswith(advice)


def test_a_draft_that_drafts_nothing_needs_no_compiled_proposals(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve K=0`."""
    run_as_traced(monkeypatch)
    said: list[str] = []
    decoding = dataclasses.replace(DECODING, num_draft_tokens=0)
    asked = {"decoding": decoding, "longest_prompt": 5, "say": said.append}
    preparation = Preparation(**asked, runner="compiled")
    engine = LocalEngine(pair, preparation)
    assert engine.runner == "compiled"
    assert not [line for line in said if "it runs with" in line]
    question = question_of(PROMPTS[:1], decoding)
    regular, speculative = (texts(records_of(arm, question.requests), 1) for arm in engine.arms)
    assert speculative == regular
    engine.close()


def test_a_head_on_a_gpu_that_its_target_is_not_on(gpus: Any) -> None:
    target, head = shipped("tiny", "tiny_eagle3")
    planned = plan_pair(target, as_draft(head), PlacementSettings(reserve_gb=0), "float32")
    demand = Demand(1, prompt_tokens=8, new_tokens=8, num_draft_tokens=4, runner="eager")
    # Neither GPU has room for both.
    free = {0: 33_000_000, 1: 33_000_000, "cpu": 10**9}
    placements = fit(planned.problem(free, demand))
    placed = PlacedPair(**vars(planned), placements=placements, free=free)
    assert [placement.device_map for placement in placements] == [{"": 0}, {"": 1}]
    assert placed.devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    # The head copies the target's embedding.
    embedding_bytes = 960 * 192 * 4
    assert placed.columns()["draft_weight_bytes"] == {
        "cuda:1": planned.sketches[1].weight_bytes + embedding_bytes
    }
    loaded = planned.place(demand).load()
    assert loaded.devices == [torch.device("cpu")]
    moved = copy.deepcopy(loaded.head).to("cuda:1")
    elsewhere = dataclasses.replace(loaded, head=moved)
    assert elsewhere.devices == [torch.device("cpu"), torch.device("cuda", 1)]


def test_a_draft_that_reads_the_target_s_cache_is_refused_before_weights_load() -> None:
    settings = SimpleNamespace(name="aid")
    run: Any = None
    for kind in ("gemma4", "gemma4_assistant"):
        config = SimpleNamespace(model_type=kind)
        checkpoints = [None, SimpleNamespace(config=config, settings=settings)]
        pair: Any = SimpleNamespace(checkpoints=checkpoints, shares_tokenizer=True)
        if kind == "gemma4":
            Local().check_pair(pair, run)
    with pytest.raises(SettingError, match=r"draft=aid: .* engine=huggingface"):
        Local().check_pair(pair, run)
