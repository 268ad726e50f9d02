from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.demand import Demand
from harness.config.errors import RunError, SettingError
from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings
from harness.config.sizes import PACKAGE
from harness.engines.arrivals import Arrival
from harness.engines.protocol import Arm, Question
from harness.engines.record import Preparation
from harness.local.decoding.loop import Iteration
from harness.local.drafting.method import Pair
from harness.local.drafting.methods import SuffixSettings
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import PlacedPair, plan_pair
from harness.local.engine.records import Local
from harness.local.engine.reference import not_finite
from harness.local.models.fit import fit
from harness.local.runners.static import StaticRunner
from loaded_pairs import load, on_gpu
from loops import records_of
from tiny_checkpoints import as_draft
from traced import run_as_traced

DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=3)
PROMPTS = [[40, 50, 60], [70, 80, 90, 100, 110]]


QUESTION = Question(PROMPTS, DECODING, seed=0, indices=range(2))


@pytest.fixture
def pair(save_model: Callable[..., ModelSettings]) -> Pair:
    return load(save_model(num_hidden_layers=1), save_model("gpt2", n_layer=1, vocab_size=320))


def open_engine(pair: Pair, runner: RunnerName) -> LocalEngine:
    return LocalEngine(
        pair,
        Preparation(decoding=DECODING, runner=runner, batch_size=2, longest_prompt=5, say=print),
    )


def texts_of(engine: LocalEngine) -> dict[str, list[list[list[int]]]]:
    return {
        arm.name: [record.tokens for record in records_of(arm, QUESTION.requests)]
        for arm in engine.arms
    }


def written(pair: Pair, runner: RunnerName) -> tuple[str, dict[str, list[list[list[int]]]]]:
    engine = open_engine(pair, runner)
    return engine.runner, texts_of(engine)


def test_each_runner_writes_the_same(save_model: Callable[..., ModelSettings]) -> None:
    pair = load(
        save_model(num_hidden_layers=1, max_position_embeddings=64),
        save_model("gpt2", n_layer=1, vocab_size=320),
    )
    name, expected = written(pair, "eager")
    assert name == "eager"
    names: list[RunnerName] = ["auto", "static"]
    for runner in names:
        engine = open_engine(pair, runner)
        assert engine.runner == ("static" if runner == "auto" else runner)
        assert texts_of(engine) == expected


def test_a_gpu_writes_the_same(save_model: Callable[..., ModelSettings], gpus: Any) -> None:
    """On a GPU, or a pretended one; recovery reads the exact distribution there."""
    draft = save_model("gpt2", n_layer=1, vocab_size=320, n_positions=64)
    pair = load(save_model(num_hidden_layers=1, max_position_embeddings=64), draft)
    found = []
    runners: list[RunnerName] = ["eager", "static"]
    for one, runner in zip([pair, on_gpu(pair)], runners, strict=True):
        engine = open_engine(one, runner)
        assert engine.runner == runner
        logits = engine.weights.reference.logits_along(PROMPTS[:1], [[7, 8, 9]])
        found.append((texts_of(engine), logits))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


def test_arms_under_stopwatches_know_no_answer_of_the_arms_that_were_timed(
    save_model: Callable[..., ModelSettings], gpus: Any
) -> None:
    """On a GPU they are asked each question again, of which a draft with a memory would know the answer."""
    suffix = SuffixSettings(name="suffix", method="suffix", shared=True)
    pair = load(save_model(num_hidden_layers=1, vocab_size=32), suffix)
    engine = open_engine(on_gpu(pair), "eager")
    timed = engine.arms[-1]
    watched = engine.stopwatches.arms()[-1]
    question = dataclasses.replace(QUESTION, prompts=[[0, 1, 2], [3, 2, 1, 0, 1]])

    def proposed(arm: Arm) -> list[list[list[int]]]:
        return [record.proposed for record in records_of(arm, question.requests)]

    first, under_stopwatches, again = proposed(timed), proposed(watched), proposed(timed)
    assert under_stopwatches == first
    assert again != first, "the arm itself remembers"


def test_4_bit_weights_are_traced_as_well(
    save_model: Callable[..., ModelSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitsandbytes' operations are the same for inductor as any others."""
    run_as_traced(monkeypatch)
    model = dataclasses.replace(save_model(num_hidden_layers=1), quantization="4bit")
    pair = load(model)
    assert getattr(pair.target.model, "is_loaded_in_4bit", False)
    name, texts = written(pair, "compiled")
    assert name == "compiled"
    assert texts == written(pair, "eager")[1]


@pytest.mark.parametrize("runner", ["auto", "static"])
def test_a_model_that_cannot_have_the_runner_gets_the_eager_one(
    save_model: Callable[..., ModelSettings], capsys: pytest.CaptureFixture[str], runner: RunnerName
) -> None:
    pair = load(
        save_model("bloom", hidden_size=32, n_layer=1, n_head=4), save_model(num_hidden_layers=1)
    )
    name, texts = written(pair, runner)
    assert name == "eager+static"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "runner=eager" in line]
    assert said.endswith("bloom takes no positions; it runs with runner=eager")
    assert texts == written(pair, "eager")[1]


def test_what_cannot_be_compiled_runs_eagerly_and_says_so(
    save_model: Callable[..., ModelSettings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails where a call is traced."""
    run_as_traced(monkeypatch)
    # A configuration that no other test compiles: the code of one serves all models of the same configuration.
    draft = save_model("gpt2", n_layer=1, vocab_size=320, layer_norm_epsilon=1e-3)
    pair = load(save_model(num_hidden_layers=1), draft)
    assert pair.draft is not None
    expected = written(pair, "eager")[1]
    norm = pair.draft.model.transformer.ln_f
    original = norm.forward
    norm.forward = lambda states: original(states) * (1 if states.sum().item() else 2)
    engine = open_engine(pair, "compiled")
    assert engine.runner == "compiled+static"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "it runs with" in line]
    assert "cannot be compiled: " in said
    assert said.endswith("it runs with runner=static")
    assert texts_of(engine) == expected


@pytest.mark.parametrize(("draft", "widths"), [(False, [1]), (True, [1, 4])])
def test_only_the_widths_that_run_are_prepared(
    save_model: Callable[..., ModelSettings],
    monkeypatch: pytest.MonkeyPatch,
    draft: bool,
    widths: list[int],
) -> None:
    prepared: list[list[int]] = []
    monkeypatch.setattr(
        StaticRunner,
        "compile",
        lambda self, batch_size, num_slots, widths: prepared.append([*widths]),
    )
    model = save_model(num_hidden_layers=1)
    open_engine(
        load(model, save_model("gpt2", n_layer=1, vocab_size=320) if draft else None), "compiled"
    )
    assert prepared == [widths, [1, 2]][: 1 + draft]


def test_a_question_may_differ_from_what_the_engine_was_opened_for(pair: Pair) -> None:
    """`recovery` asks at temperature 0 too, `compare` after a setting was changed."""
    engine = open_engine(pair, "eager")
    greedy = dataclasses.replace(
        QUESTION, decoding=dataclasses.replace(DECODING, num_draft_tokens=1, temperature=0.0)
    )
    regular, speculative = (_by_row(records_of(arm, greedy.requests)) for arm in engine.arms)
    assert regular == speculative
    assert [len(row) for row in regular] == [12, 12]
    assert all(
        len(proposed) <= 1
        for record in records_of(engine.arms[1], greedy.requests)
        for proposed in record.proposed
    )


def test_stopwatches_count_every_pass(pair: Pair) -> None:
    engine = open_engine(pair, "eager")
    regular, speculative = engine.stopwatches.arms()
    for _ in range(2):  # each question by itself
        answered = regular.answer(QUESTION.requests, len(QUESTION.prompts))
        assert answered.batch.num_iterations == 11
        assert answered.phases.calls == {"forward": 11}
    arrivals: list[Arrival] = []
    answered = speculative.answer(QUESTION.requests, len(QUESTION.prompts), watch=arrivals.extend)
    num_iterations = answered.batch.num_iterations
    assert len({arrival.seconds for arrival in arrivals}) == num_iterations + 1
    # The last turn may have nothing to draft.
    num_drafted = len({arrival.seconds for arrival in arrivals if arrival.proposed})
    assert num_iterations - 1 <= num_drafted
    assert answered.phases.calls == {"forward": num_iterations, "drafting": num_drafted}


def _by_row(records: Iterator[Iteration]) -> list[list[int]]:
    rows: list[list[int]] = [[], []]
    for record in records:
        for row, tokens in zip(record.rows, record.tokens, strict=True):
            rows[row] += tokens
    return rows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", ["model", "draft"])
def test_logits_that_are_not_finite_are_an_error(pair: Pair, value: float, role: str) -> None:
    broken = pair.target if role == "model" else pair.draft
    assert broken is not None
    with torch.no_grad():
        broken.model.get_output_embeddings().weight[7] = value
    said = rf"{role}: .* gives logits that are nan or infinite in float32, at new token \d"
    engine = open_engine(pair, "eager")
    for arm in engine.arms[0 if role == "model" else 1 :]:
        with pytest.raises(RunError, match=said):
            list(records_of(arm, QUESTION.requests))
    if role == "model":
        with pytest.raises(RunError, match="at token 3 of prompt and text"):
            engine.weights.reference.logits(PROMPTS)


@pytest.mark.parametrize(
    ("role", "dtype", "advice"),
    [
        (
            "model",
            torch.float16,
            "its numbers overflow: try model.dtype=bfloat16 or float32, or check its weights",
        ),
        (
            "draft",
            torch.bfloat16,
            "its numbers overflow: try draft.dtype=float32, or check its weights",
        ),
        ("draft", torch.float32, "check its weights"),
    ],
)
def test_the_advice_is_a_format_with_more_room(
    pair: Pair, role: str, dtype: torch.dtype, advice: str
) -> None:
    held = dataclasses.replace(getattr(pair, "target" if role == "model" else role), dtype=dtype)
    pair = dataclasses.replace(pair, **{"target" if role == "model" else role: held})
    assert str(not_finite(pair, role, "new token 0")).endswith(f"at new token 0; {advice}")
    # A head, for example, computes in the format of the target.
    alone = dataclasses.replace(
        pair, target=dataclasses.replace(pair.target, dtype=torch.float16), draft=None
    )
    assert "try model.dtype=bfloat16 or float32" in str(not_finite(alone, role, "new token 0"))


@pytest.mark.parametrize("draft", ["tiny_draft", "tiny_eagle3"])
def test_a_draft_that_drafts_nothing_needs_no_compiled_proposals(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve K=0`."""
    run_as_traced(monkeypatch)
    said: list[str] = []
    shipped = PACKAGE / "local" / "models" / "shipped"
    target, own = (
        ModelSettings(name=name, repository=str(shipped / name)) for name in ("tiny", draft)
    )
    decoding = dataclasses.replace(DECODING, num_draft_tokens=0)
    preparation = Preparation(
        decoding=decoding, runner="compiled", longest_prompt=5, say=said.append
    )
    engine = LocalEngine(load(target, own), preparation)
    assert engine.runner.startswith("compiled")
    assert not [line for line in said if "it runs with" in line]
    question = Question(PROMPTS[:1], decoding, seed=0, indices=[0])
    regular, speculative = (_by_row(records_of(arm, question.requests)) for arm in engine.arms)
    assert speculative == regular
    engine.close()


def test_a_head_on_a_gpu_that_its_target_is_not_on(gpus: Any) -> None:
    shipped = PACKAGE / "local" / "models" / "shipped"
    target, head = (
        ModelSettings(name=name, repository=str(shipped / name)) for name in ("tiny", "tiny_eagle3")
    )
    planned = plan_pair(target, as_draft(head), PlacementSettings(reserve_gb=0), "float32")
    demand = Demand(1, prompt_tokens=8, new_tokens=8, num_draft_tokens=4, runner="eager")
    # Neither GPU has room for both.
    free = {0: 33_000_000, 1: 33_000_000, "cpu": 10**9}
    placements = fit(planned.case(free, demand))
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
    def checkpoint(name: str, kind: str) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(model_type=kind), settings=SimpleNamespace(name=name)
        )

    pair: Any = SimpleNamespace(
        checkpoints=[checkpoint("big", "gemma4"), checkpoint("aid", "gemma4")]
    )
    run: Any = None
    Local().check_pair(pair, run)
    pair.checkpoints[1] = checkpoint("aid", "gemma4_assistant")
    with pytest.raises(SettingError, match=r"draft=aid: reads the keys .* engine=huggingface"):
        Local().check_pair(pair, run)
