import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.modeling_layers import MtpModel

from chain_pair import save_chain_pair
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, ModelSettings, PlacementSettings
from harness.engines.arrivals import Arrival, Origin
from harness.engines.protocol import Arm, Question
from harness.engines.record import Preparation
from harness.local.drafting.method import LookupSettings, Pair, SampledDraftSettings
from harness.local.engine.engine import LocalEngine
from harness.local.engine.huggingface import HuggingFaceArm, HuggingFaceEngine, check_pair
from harness.local.engine.pair import plan_pair
from in_process import Harness
from mtp_models import mtp_target, save_with_mtp
from some_questions import question_of
from tiny_checkpoints import as_draft, load, make_tokenizer

GREEDY = DecodingSettings(max_new_tokens=24, num_draft_tokens=4, temperature=0)
PROMPT = [40, 50, 60, 40, 50]


def ask(
    decoding: DecodingSettings = GREEDY,
    prompt: list[int] = PROMPT,
    stop: frozenset[int] = frozenset(),
) -> Question:
    return question_of([prompt], decoding, seed=3, indices=[7], stop_tokens=stop)


@pytest.fixture
def chain(tmp_path: Path) -> Pair:
    paths = map(str, save_chain_pair(tmp_path))
    target, draft = (ModelSettings(name=path, repository=path) for path in paths)
    return load(target, draft)


@pytest.fixture
def pair(save_model: Callable[..., ModelSettings]) -> Pair:
    return load(save_model(), save_model(name="draft", num_hidden_layers=1))


def with_lookup(pair: Pair, **more: int) -> Pair:
    settings = LookupSettings(name="lookup", method="lookup", **more)
    return dataclasses.replace(pair, draft=None, draft_settings=settings)


@pytest.fixture
def engine(pair: Pair) -> Iterator[HuggingFaceEngine]:
    engine = HuggingFaceEngine(pair, Preparation(decoding=GREEDY))
    yield engine
    engine.close()


def read(arm: Arm, question: Question) -> Sequence[Arrival]:
    """What each iteration decided."""
    return arm.answer(question.requests, 1).arrivals


def tokens_of(arrivals: Sequence[Arrival]) -> list[int]:
    return [token for arrival in arrivals for token in arrival.tokens]


def test_greedy_texts_are_those_of_our_loop(pair: Pair, engine: HuggingFaceEngine) -> None:
    expected = tokens_of(read(LocalEngine(pair, Preparation(decoding=GREEDY)).arms[0], ask()))
    assert len(expected) == 24
    lookup = HuggingFaceEngine(with_lookup(pair), Preparation(decoding=GREEDY))
    for arm in (*engine.arms, *lookup.arms):
        assert tokens_of(read(arm, ask())) == expected
    [record] = lookup.arms[1].answer(ask(prompt=[40, 50, 60]).requests, 1).requests
    assert (0, 0) in record.outcomes, "a pass that drafted nothing is an iteration as well"
    assert 1 + sum(1 + accepted for _, accepted in record.outcomes) == record.num_tokens
    # Lookup searches for the longest sequence that was asked for: 50 came first before 70, and 40 50 before 60.
    for longest, proposed in ((1, [70, 40, 50, 60]), (3, [60, 45, 40, 50])):
        with_draft = with_lookup(pair, max_ngram=longest)
        arm = HuggingFaceEngine(with_draft, Preparation(decoding=GREEDY)).arms[1]
        first, *_ = read(arm, ask(prompt=[50, 70, 40, 50, 60, 45, 40, 50]))
        assert first.proposed == proposed


def test_acceptance_is_counted_as_in_our_loop(chain: Pair) -> None:
    """Hugging Face drafts from the prompt on, our loop from the first token on: it gets one token less to write."""
    ids = chain.tokenizer("a one")["input_ids"]
    shorter = dataclasses.replace(GREEDY, max_new_tokens=23)
    ours = read(LocalEngine(chain, Preparation(decoding=GREEDY)).arms[1], ask(GREEDY, ids[:1]))
    engine = HuggingFaceEngine(chain, Preparation(decoding=shorter))
    theirs = read(engine.arms[1], ask(shorter, ids))
    assert tokens_of(ours)[1:] == tokens_of(theirs)
    expected = [(one.proposed, one.origins) for one in theirs]
    assert [(one.proposed, one.origins) for one in ours[1:]] == expected
    assert [one.origins.count(Origin.DRAFT) for one in theirs] == [0, 4, 4, 4, 4, 1]
    origins = {origin for one in theirs for origin in one.origins}
    assert origins == {Origin.DRAFT, Origin.RECOVERED, Origin.BONUS}


def test_a_text_ends_with_a_stop_token(chain: Pair) -> None:
    question = ask(prompt=chain.tokenizer("a")["input_ids"], stop=chain.stop_tokens())
    for arm in HuggingFaceEngine(chain, Preparation(decoding=GREEDY)).arms:
        tokens = tokens_of(read(arm, question))
        assert len(tokens) == 13
        assert tokens[-1] in chain.stop_tokens()
    assert chain.target.model.generation_config.eos_token_id == 1  # put back


def test_sampling_takes_the_warp_and_its_own_seed(engine: HuggingFaceEngine, pair: Pair) -> None:
    hot = dataclasses.replace(GREEDY, temperature=5.0, max_new_tokens=32)
    pair.target.model.generation_config.top_k = 1  # the model's own, which must have no effect
    for arm in engine.arms:
        first, again = (tokens_of(read(arm, ask(hot))) for _ in range(2))
        other = tokens_of(read(arm, question_of([[5, 6, 7]], hot, seed=4, indices=[7])))
        assert first == again
        assert first != other
        assert len(first) == len(other) == 32
        only = tokens_of(read(arm, ask(dataclasses.replace(hot, top_k=1))))
        assert only == tokens_of(read(arm, ask(dataclasses.replace(GREEDY, max_new_tokens=32))))


def test_the_time_of_a_request_begins_when_the_one_before_ends(engine: HuggingFaceEngine) -> None:
    answered = engine.arms[0].answer([*ask().requests, *ask().requests], 1)
    assert sum(record.arrivals[-1] for record in answered.requests) <= answered.seconds


def test_a_failure_in_generate_is_raised_and_leaves_the_model_as_it_was(
    pair: Pair, engine: HuggingFaceEngine
) -> None:
    with pytest.raises(IndexError):
        read(engine.arms[1], ask(prompt=[100_000]))
    assert len(read(engine.arms[0], ask())) == 24


def check_proposals(pair: Pair, num_draft_tokens: int, arguments: dict[str, Any]) -> None:
    """`generate`, with a head of transformers' own, drafts what our loop drafts, and beyond the end of the text."""
    decoding = dataclasses.replace(GREEDY, num_draft_tokens=num_draft_tokens)
    ours = LocalEngine(pair, Preparation(decoding=decoding))
    theirs = HuggingFaceArm("speculative", pair, ours.weights, arguments)
    question = ask(decoding, prompt=list(range(40, 60)))
    expected, found = (read(arm, question) for arm in (ours.arms[1], theirs))
    assert tokens_of(found) == tokens_of(expected)
    assert len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert one.proposed[: len(other.proposed)] == other.proposed
        assert one.origins.count(Origin.DRAFT) == other.origins.count(Origin.DRAFT)
    assert len(found[1].proposed) == num_draft_tokens
    ours.close()


def save_dflash(directory: Path, kind: str) -> ModelSettings:
    """A DFlash head with random weights for `save_model`'s Llama, as transformers saves it."""
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, rms_norm_eps=1e-5, sliding_window=8, layer_types=[kind, "full_attention"], block_size=4,
        mask_token_id=7, target_layer_ids=[0, 2], max_position_embeddings=512,
    )  # fmt: skip
    head = MuseGlimmerAssistantModel(config)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    head.save_pretrained(directory)
    return ModelSettings(name="head", repository=str(directory))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_dflash_heads_draft_as_in_our_loop(
    save_model: Callable[..., ModelSettings], tmp_path: Path, kind: str
) -> None:
    """Also the shape of a window: the text is four windows long."""
    target = save_model(initializer_range=0.1)
    settings = save_dflash(tmp_path / "head", kind)
    head: Any = MuseGlimmerAssistantModel.from_pretrained(settings.repository).eval()
    head.generation_config = None  # which it lacks, as it generates nothing by itself
    arguments = {"assistant_model": head, "speculation_type": "dflash"}
    check_proposals(load(target, settings), 3, arguments)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_layers_draft_as_in_our_loop(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, layers = mtp_target(family)
    # It would look for them on the hub.
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: layers.eval())
    save_with_mtp(target, layers, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = ModelSettings(name=family, repository=str(tmp_path))
    pair = load(model, SampledDraftSettings(name="mtp", method="mtp"))
    check_proposals(pair, 1, {"use_mtp": True})


def test_heads_are_refused(save_model: Callable[..., ModelSettings], tmp_path: Path) -> None:
    target = save_model()
    head = as_draft(save_dflash(tmp_path / "head", "full_attention"))
    with pytest.raises(SettingError, match="draft=head: must be a model"):
        check_pair(plan_pair(target, head, PlacementSettings()), GREEDY)


def test_a_draft_with_another_tokenizer_needs_another_number_of_outputs_and_no_sampling(
    harness: Harness, save_model: Callable[..., ModelSettings]
) -> None:
    target, other = save_model(), make_tokenizer(extra_tokens=("<extra>",))
    same, fewer = (
        as_draft(save_model("gpt2", f"draft_{size}", tokenizer=other, vocab_size=size))
        for size in (320, 300)
    )
    planned = plan_pair(target, fewer, PlacementSettings())
    check_pair(planned, GREEDY)
    with pytest.raises(SettingError, match="has 300 outputs against 320"):
        check_pair(planned, dataclasses.replace(GREEDY, temperature=0.7))
    with pytest.raises(SettingError, match="must have the model's tokenizer"):
        check_pair(plan_pair(target, same, PlacementSettings()), GREEDY)
    pair = [f"model={target.repository}", f"draft={fewer.repository}", "temperature=0"]
    refused = harness.refused("latency", *pair)
    assert "has another tokenizer than the model: engine=huggingface may draft with both" in refused
