"""Gemma 4 assistants against transformers' own, over every runner that has a cache."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from architectures import random_model
from chains import GREEDY, request, texts
from gemma4_models import (
    VOCABULARY,
    assistant_config,
    assistant_of,
    drafter_over,
    head_of,
    settings_of,
    target_of,
)
from harness.config.errors import SettingError
from harness.local.decoding.loops import autoregressive, speculative
from harness.local.decoding.protocols import Runner
from harness.local.decoding.warp import Warp
from harness.local.drafting.heads.drafter import HeadDrafter
from harness.local.drafting.heads.formats import StoredHead
from harness.local.drafting.heads.prepared import PreparedHead
from harness.local.drafting.kinds.gemma4_assistant import RECORD
from harness.local.models.checkpoints import Checkpoint
from harness.local.runners.compiled import PreparedRunner
from harness.local.runners.eager import EagerRunner
from harness.local.runners.prepared_calls import RunnerShapes
from harness.local.runners.shared_prefix import SharedPrefixRunner
from harness.local.runners.slots import UnsupportedModelError
from harness.local.runners.static import StaticRunner
from head_references import PROMPTS, Checked
from known_heads import read_head
from traced import run_as_traced

pytestmark = pytest.mark.skipif(
    "gemma4_unified_assistant" not in CONFIG_MAPPING, reason="an older transformers"
)

K = 4
KINDS = {
    "plain": ("gemma4", False, 0),
    "centroids": ("gemma4", True, 3),
    "unified": ("gemma4_unified", False, 0),
    "unified, centroids": ("gemma4_unified", True, 2),
}
Pair = tuple[PreTrainedModel, PreTrainedModel]


def pair_of(kind: str) -> Pair:
    """A target and transformers' own assistant."""
    family, centroids, num_shared = KINDS[kind]
    return target_of(family, num_shared), assistant_of(assistant_config(family, centroids))


def target_states(target: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The last states [1, n, D], and the keys and values that an assistant reads, of one text."""
    cache = DynamicCache()
    output = target(input_ids=tokens[None], past_key_values=cache, output_hidden_states=True)
    last = {}
    types = target.config.get_text_config().layer_types
    # Layers without keys of their own are not in the cache.
    for layer, kind in zip(cache.layers, types, strict=False):
        last[kind] = layer.keys, layer.values
    return output.hidden_states[-1], last


def transformers_says(target: PreTrainedModel, assistant: PreTrainedModel) -> Any:
    """The log-probabilities of its drafts, with the tokens that were drawn between them."""

    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        hidden, shared = target_states(target, decided[:-1])
        states = hidden[:, -1:]
        found = []
        for token in [decided[-1], *drawn[:-1]]:
            embedded = target.get_input_embeddings()(token.view(1, 1))
            output = assistant(
                inputs_embeds=torch.cat([embedded, states], dim=-1),
                position_ids=torch.tensor([[len(decided) - 1]]),
                attention_mask=torch.ones(1, len(decided)),
                shared_kv_states=shared,
            )
            found.append(output.logits[0, 0].log_softmax(-1))
            states = output.last_hidden_state
        return torch.stack(found)

    return expected


def prepared(target: PreTrainedModel, **options: Any) -> PreparedRunner:
    runner = PreparedRunner(target, compiled=False, captured=True, **options)
    runner.prepare(RunnerShapes(len(PROMPTS), 64, (1, K + 1)))
    return runner


RUNNERS: dict[str, Callable[..., Runner]] = {
    "eager": EagerRunner,
    "static": StaticRunner,
    "prepared": prepared,
    "shared prefix": lambda target, **options: SharedPrefixRunner(EagerRunner(target, **options)),
}


@pytest.mark.parametrize(
    ("kind", "runner_name"),
    [*((kind, "static") for kind in KINDS), *(("centroids", runner) for runner in RUNNERS)],
)
def test_distributions_are_those_of_transformers(kind: str, runner_name: str) -> None:
    """Over ragged rows that accept different numbers of tokens and end at different times."""
    target, assistant = pair_of(kind)
    head = head_of(target, assistant)
    runner = RUNNERS[runner_name](target, hidden_layers=head.config.layers)
    drafter = drafter_over(runner, head, target, Warp())
    checked = Checked(drafter, target, transformers_says(target, assistant))
    what = request(PROMPTS, Warp(), length=30, stop=range(40, 44))
    iterations = list(speculative(runner, checked, what, K))
    assert len({len(iteration.rows) for iteration in iterations}) > 1
    assert len(checked.num_accepted) >= 2
    assert checked.error < 1e-5


@pytest.mark.skipif(
    "model_kwargs" in signature(SinglePositionMultiTokenCandidateGenerator.__init__).parameters,
    reason="an older transformers makes it otherwise",
)
def test_greedy_drafts_are_those_of_transformers_own_generator() -> None:
    target, assistant = pair_of("centroids")
    head = head_of(target, assistant)
    prompt, first = PROMPTS[2], 7
    runner = EagerRunner(target, hidden_layers=head.config.layers)
    drafter = drafter_over(runner, head, target, GREEDY)
    drafter.start([prompt], [first], runner.start([prompt]))
    proposal = drafter.propose(K, torch.zeros(1, K))

    assistant.generation_config.num_assistant_tokens = K
    config = GenerationConfig(max_length=100)
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), config
    )
    hidden, shared = target_states(target, torch.tensor(prompt))
    tokens, _ = generator.get_candidates(
        torch.tensor([[*prompt, first]]),
        {"attention_mask": torch.ones(1, len(prompt) + 1)},
        SimpleNamespace(hidden_states=[hidden], shared_kv_states=shared),
        is_first_iteration=False,
        n_last_matches=0,
    )
    assert proposal.tokens.tolist() == tokens[:, len(prompt) + 1 :].tolist()


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_rows_that_join_leave_and_roll_back(runner_name: str) -> None:
    target, assistant = pair_of("centroids")
    head = head_of(target, assistant)
    runner = RUNNERS[runner_name](target, hidden_layers=head.config.layers)
    drafter = drafter_over(runner, head, target, Warp())
    says = transformers_says(target, assistant)
    rows = [[*prompt, 7] for prompt in PROMPTS[:2]]

    def check() -> Tensor:
        uniforms = torch.rand(len(rows), K, generator=torch.Generator().manual_seed(len(rows)))
        proposal = drafter.propose(K, uniforms)
        assert proposal.probabilities is not None
        for row, tokens, drawn_from in zip(
            rows, proposal.tokens, proposal.probabilities, strict=True
        ):
            expected = says(torch.tensor(row), tokens, tokens)
            torch.testing.assert_close(drawn_from.log(), expected, atol=1e-5, rtol=0)
        return proposal.tokens

    def settle(tokens: Tensor, kept: list[int]) -> None:
        last = torch.tensor([row[-1:] for row in rows])
        step = runner.extend(torch.cat([last, tokens], dim=1))
        runner.keep([count + 1 for count in kept])
        following = list(range(20, 20 + len(rows)))
        drafter.observe(kept, following, step)
        for row, proposed, count, token in zip(rows, tokens.tolist(), kept, following, strict=True):
            row += [*proposed[:count], token]

    with torch.inference_mode():
        drafter.start(PROMPTS[:2], [7, 7], runner.start(PROMPTS[:2]))
        settle(check(), [3, 0])
        settle(check(), [4, 1])
        step = runner.add(PROMPTS[2:])
        drafter.add(PROMPTS[2:], [9], step)
        rows.append([*PROMPTS[2], 9])
        settle(check(), [0, 2, 4])
        runner.select([2, 0])
        drafter.select([2, 0])
        rows[:] = [rows[2], rows[0]]
        settle(check(), [1, 1])
        check()


def test_the_target_s_greedy_text_is_kept() -> None:
    target, assistant = pair_of("unified, centroids")
    head = head_of(target, assistant)
    what = request(PROMPTS, GREEDY, length=20)
    runner = StaticRunner(target, hidden_layers=head.config.layers)
    drafter = drafter_over(runner, head, target, GREEDY)
    drafted = texts(speculative(runner, drafter, what, K), len(PROMPTS))
    assert drafted == texts(autoregressive(EagerRunner(target), what), len(PROMPTS))


def test_a_row_s_distribution_does_not_depend_on_its_batch() -> None:
    """Not with centroids either, where transformers' own takes the least logit of all rows."""
    target, assistant = pair_of("centroids")
    head = head_of(target, assistant)
    states = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([head.logits(row[None]) for row in states])
    torch.testing.assert_close(head.logits(states), alone)
    outside = alone.amin(-1, keepdim=True)
    assert (alone == outside).sum(-1).eq(VOCABULARY * 7 // 9).all()
    theirs = assistant.masked_embedding(states, assistant.lm_head.weight)
    assert not torch.allclose(theirs, alone)


@pytest.mark.parametrize("compiled", [False, True])
def test_prepared_proposals_are_the_eager_ones(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for fewer rows, again with the same slots, and eagerly where a text or a batch outgrows them. The target is
    only captured: compiled targets have tests of their own. Compiled parts run as they were traced.
    """
    if compiled:
        run_as_traced(monkeypatch)
    target, assistant = pair_of("centroids")
    head = head_of(target, assistant)
    warp = Warp(0.8)
    runner = prepared(target, hidden_layers=head.config.layers)
    num_drafted = 2 if compiled else K
    proposals = PreparedHead(
        drafter_over(runner, head, target, warp), target, VOCABULARY, compiled=compiled, captured=not compiled
    )  # fmt: skip
    proposals.prepare(len(PROMPTS), 64, (num_drafted,))
    eager = []
    run_eagerly = HeadDrafter._run_eagerly

    def counted(drafter: HeadDrafter, *arguments: Any) -> Any:
        eager.append(drafter)
        return run_eagerly(drafter, *arguments)

    monkeypatch.setattr(HeadDrafter, "_run_eagerly", counted)
    num_slots = runner.cached([0]).layers[0][0].shape[2]
    long = [[1 + place % 50 for place in range(num_slots - 2)]]
    for prompts, is_prepared in (
        (PROMPTS, True),
        (PROMPTS[:1], True),
        (long, False),
        ([*PROMPTS, [7, 7]], False),
        (PROMPTS, True),
    ):
        what = request(prompts, warp, length=16, stop=range(40, 43))
        plain = EagerRunner(target, hidden_layers=head.config.layers)
        expected = texts(
            speculative(plain, drafter_over(plain, head, target, warp), what, num_drafted),
            len(prompts),
        )
        eager.clear()
        drafter = drafter_over(runner, head, target, warp)
        drafter.prepared = proposals
        assert texts(speculative(runner, drafter, what, num_drafted), len(prompts)) == expected
        assert bool(eager) != is_prepared


def test_proposals_are_not_prepared_over_a_cache_that_is_not() -> None:
    target, assistant = pair_of("plain")
    head = head_of(target, assistant)
    runner = StaticRunner(target, hidden_layers=head.config.layers)
    runner.start(PROMPTS)
    drafter = drafter_over(runner, head, target, GREEDY)
    proposals = PreparedHead(drafter, target, VOCABULARY, compiled=False, captured=True)
    with pytest.raises(UnsupportedModelError, match="reads the model's cache"):
        proposals.prepare(1, 64, (K,))


def test_a_text_that_is_there_already() -> None:
    """Places of a text get the probabilities of a proposal from there."""
    target, assistant = pair_of("unified")
    head = head_of(target, assistant)
    prompt, text = PROMPTS[0], [5, 3, 5, 8, 9, 7, 9, 3, 2]
    read = [*prompt, *text[:-1]]
    runner = EagerRunner(target, hidden_layers=head.config.layers)
    drafter = drafter_over(runner, head, target, Warp())
    hidden = runner.start([read]).hidden
    assert hidden is not None
    answer = range(len(prompt), len(prompt) + len(text))
    found = drafter.along([*prompt, *text], [answer], hidden[0], K)
    says = transformers_says(target, assistant)
    for place in range(len(text) - 1):
        upcoming = torch.tensor(text[place + 1 : place + 1 + K])
        decided = torch.tensor([*prompt, *text[: place + 1]])
        with torch.inference_mode():
            logs = says(decided, upcoming, upcoming).gather(-1, upcoming[:, None]).squeeze(-1)
        torch.testing.assert_close(found[place, : len(upcoming)].log(), logs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_transformers_saved(kind: str, tmp_path: Path) -> None:
    target, assistant = pair_of(kind)
    assistant.save_pretrained(tmp_path)
    checkpoint = Checkpoint("model", settings_of("target"), target.config)
    found = read_head(settings_of(str(tmp_path)), checkpoint)
    assert found is not None
    head = found.load(torch.device("cpu"), torch.float32)
    for name, expected in head_of(target, assistant).state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], expected)
    sketch = found.sketch(torch.float32)
    # Each layer has a scalar that is no parameter in transformers.
    assert sketch.num_parameters == assistant.num_parameters() + 3
    shares = {tensor.name: tensor.read_per_token for tensor in sketch.tensors}
    assert shares["model.embed_tokens.weight"] == (2 / 9 if KINDS[kind][1] else 1)
    assert sketch.blocks[0].caches[0].numbers_per_token == 0


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another width": ({}, {"backbone_hidden_size": 48}, "model of hidden size 48; model=target has 32"),
    "another vocabulary": ({"vocab_size": 100}, {}, "model of vocabulary size 99; model=target has 100"),
    "other keys": ({"head_dim": 4}, {}, "other keys in its layers of type sliding_attention than model=target"),
    "groups": (
        {}, {"use_ordered_embeddings": True, "num_centroids": 7}, "choose 2 of 7 equal groups of 99 tokens",
    ),
    "no configuration": ({}, {"text_config": {"model_type": "gemma4_text", "head_dim": "x"}}, "transformers refuses"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_target_s_assistant_is_refused_in_a_line(case: str) -> None:
    of_target, of_assistant, message = REFUSED[case]
    target = target_of("gemma4", **of_target)
    raw = assistant_config("gemma4", centroids=False).to_dict() | of_assistant
    checkpoint = Checkpoint("model", settings_of("target"), target.config)
    with pytest.raises(SettingError, match=message) as caught:
        RECORD.config(StoredHead(settings_of("assistant"), checkpoint, raw), None)
    assert "\n" not in str(caught.value)


def test_a_target_that_is_no_gemma_4_is_refused() -> None:
    checkpoint = Checkpoint("model", settings_of("target"), random_model("llama").config)
    raw = assistant_config("gemma4", centroids=False).to_dict()
    with pytest.raises(SettingError, match="keys and values of a Gemma 4; model=target is llama"):
        RECORD.config(StoredHead(settings_of("assistant"), checkpoint, raw), None)


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.local.drafting.kinds.gemma4_assistant.CONFIG_MAPPING", {})
    checkpoint = Checkpoint("model", settings_of("target"), target_of("gemma4").config)
    raw = assistant_config("gemma4", centroids=False).to_dict()
    with pytest.raises(
        SettingError, match=r"gemma4_assistant, which transformers \d.* does not know"
    ):
        RECORD.config(StoredHead(settings_of("assistant"), checkpoint, raw), None)


def test_other_layers_cannot_be_asked_for() -> None:
    checkpoint = Checkpoint("model", settings_of("target"), target_of("gemma4").config)
    raw = assistant_config("gemma4", centroids=False).to_dict()
    with pytest.raises(SettingError, match=r"^draft.layers=\[1,2\]: must be null"):
        RECORD.config(StoredHead(settings_of("assistant"), checkpoint, raw, (1, 2)), None)
