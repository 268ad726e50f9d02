"""Drafts with another tokenizer: the target's distribution stays what it is, whatever the vocabularies share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chains import RAGGED, SIZE, chain, requests, row_steps, speculative, texts
from fakes import MarkovRunner
from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.decoding.protocols import NonFiniteError, Proposal, Step
from harness.local.decoding.warp import Warp
from harness.local.drafting.translated import TranslatedDrafter, Translation, translation
from harness.local.engine.pair import plan_pair
from harness.local.engine.reading import draft_probabilities_by_replay
from in_process import Harness, results
from tiny_checkpoints import as_draft, make_tokenizer, spaced_tokenizer

OWN_SIZE = 10


def toy() -> Translation:
    """Token t is the draft's 9 - t for t < 7; the target's others are two of the draft's."""
    common = {token: OWN_SIZE - 1 - token for token in range(7)}

    def spell(token: int) -> list[int]:
        return [common[token]] if token in common else [1, token % 3]

    def prompt_into_draft(tokens: Sequence[int]) -> list[int]:
        return [own for token in [*tokens, 0] for own in spell(token)]

    return Translation(common, prompt_into_draft, spell, SIZE)


def own_chain(seed: int) -> Tensor:
    return torch.randn(OWN_SIZE, OWN_SIZE, generator=torch.Generator().manual_seed(seed)).softmax(
        -1
    )


class Checked(TranslatedDrafter):
    """Compares what its runner has been fed with the whole text."""

    def start(self, prompts, first_tokens, step):  # type: ignore[no-untyped-def]
        super().start(prompts, first_tokens, step)
        self.whole = [self._translation.prompt_into_draft(prompt) for prompt in prompts]
        self.learn([[token] for token in first_tokens])

    def learn(self, decided: Sequence[Sequence[int]]) -> None:
        for row, tokens in enumerate(decided):
            self.whole[row] += self._translation.into_draft(tokens)

    def observe(self, num_accepted, decided, step):  # type: ignore[no-untyped-def]
        self.learn(decided)
        super().observe(num_accepted, decided, step)
        for seen, unread, whole in zip(self.runner.rows, self._unread, self.whole, strict=True):  # type: ignore[attr-defined]
            assert seen + unread == whole

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.whole = [self.whole[row] for row in rows]


def test_the_draft_model_reads_the_whole_text() -> None:
    # The draft's version of the target `chain(0)`, so far as it knows its tokens.
    own = own_chain(0)
    for token in range(7):
        for following in range(7):
            own[9 - token, 9 - following] = chain(0)[token, following]
    own /= own.sum(-1, keepdim=True)
    drafter = Checked(MarkovRunner(own), toy(), Warp(1.0))
    what = requests(RAGGED, Warp(1.0), length=60, stop=[8])
    iterations = list(speculative(MarkovRunner(chain(0)), drafter, what, 3))
    assert {0, 1, 2} <= {row_step.num_accepted for row_step in row_steps(iterations)}


class Unmapped(TranslatedDrafter):
    """The broken twin: probabilities at the draft's own places instead of the target's."""

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        proposal = super().propose(num_draft_tokens, uniforms)
        return Proposal(proposal.tokens, proposal.probabilities.roll(1, -1))


@pytest.mark.parametrize(("kind", "lossless"), [(TranslatedDrafter, True), (Unmapped, False)])
def test_sampling_follows_the_target(kind: type[TranslatedDrafter], lossless: bool) -> None:
    num_rows, warp, target = 5_000, Warp(1.0), chain(0, 1.0)
    drafter = kind(MarkovRunner(own_chain(1)), toy(), warp)
    what = requests([[3]] * num_rows, warp, length=4, indices=range(num_rows))
    found = texts(speculative(MarkovRunner(target), drafter, what, 2), num_rows)
    p_values = []
    for place in (1, 2, 3):
        seen = torch.tensor(found)[:, place].bincount(minlength=SIZE).double()
        exact = torch.linalg.matrix_power(target.double(), place + 1)[3] * num_rows
        p_values.append(stats.chisquare(seen, exact * seen.sum() / exact.sum()).pvalue)
    assert (min(p_values) > 1e-9) == lossless


def trained_tokenizer(
    corpus: list[str], size: int, special: Sequence[str] = ("</s>",)
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special)
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_tokens_are_compared_by_their_bytes() -> None:
    target, draft = make_tokenizer(), trained_tokenizer(["höher und höher und höher"] * 9, 270)
    found = translation(target, draft, 320, 320)
    for one, own in found.common.items():
        if one != target.eos_token_id:
            assert target.convert_ids_to_tokens(one) == draft.convert_ids_to_tokens(own)
    assert found.common[target.eos_token_id] == draft.eos_token_id
    text = " höher €"
    assert draft.decode(found.into_draft(target(text)["input_ids"])) == text
    back = translation(draft, target, 320, 320)
    begin = draft(" höher")["input_ids"]
    assert len(begin) == 1
    assert target.decode(back.into_draft(begin)) == " höher", "tokens that it lacks are spelt"


def test_only_tokens_with_an_output_are_common() -> None:
    target = make_tokenizer()
    most = translation(target, trained_tokenizer([], 257), 320, 257).common
    fewer = translation(target, trained_tokenizer([], 257), 320, 200).common
    assert max(most.values()) == 256
    assert max(fewer.values()) == 199
    assert fewer.items() < most.items()


SaveModel = Callable[..., ModelSettings]


def test_from_the_command_line(harness: Harness, save_model: SaveModel, tmp_path: Path) -> None:
    prompts = "one\ntwo words\nfour four four four\nhöher €\n"
    (tmp_path / "prompts.txt").write_text(prompts, encoding="utf-8")
    tokenizer = trained_tokenizer(["two words four four"] * 9, 270)
    target = save_model("llama", "model")
    size = len(tokenizer)
    draft = save_model("gpt2", "draft", tokenizer=tokenizer, vocab_size=size, n_positions=256)
    pair = [f"model={target.name}", f"draft={draft.name}", "prompts=prompts.txt"]
    quick = ["num_prompts=4", "batch_size=2", "num_warmup=0", "T=0", "tokens=10"]
    outcome = harness("latency", *pair, *quick)
    number = f"draft {draft.name}: another tokenizer; it draws from the 257 tokens that the model"
    assert number in outcome.stderr
    assert results().iloc[-1]["identical_prompts"] == 4


def test_a_draft_that_makes_more_of_a_text_needs_more_room(save_model: SaveModel) -> None:
    target = save_model(tokenizer=trained_tokenizer(["two words four four"] * 9, 270))
    rare = save_model("gpt2", "rare", tokenizer=make_tokenizer(), n_positions=256)
    planned = plan_pair(target, as_draft(rare), PlacementSettings())
    text = planned.tokenizer("two words four four " * 10)["input_ids"]
    excess = planned.excess([text], 64)
    assert excess is not None
    found = re.search(r"with decoding.max_new_tokens=64 \(about (\d+) tokens of the", str(excess))
    assert int(found[1]) > 64


def test_what_cannot_be_translated_is_refused(save_model: SaveModel) -> None:
    target, tokenizer = save_model(), trained_tokenizer(["two words four four"] * 9, 270)
    short = save_model("gpt2", "short", tokenizer=tokenizer, vocab_size=258)
    planned = plan_pair(target, as_draft(short), PlacementSettings())
    with pytest.raises(SettingError, match=r"^draft\.tokenizer: has token"):
        planned.check_vocabulary([planned.tokenizer("two words four four")["input_ids"]])
    other = save_model("gpt2", "other", tokenizer=spaced_tokenizer(), vocab_size=905)
    parallel = save_model("gpt2", "parallel", tokenizer=tokenizer, pard_token=5)
    with pytest.raises(SettingError, match="one pass, and must have the model's tokenizer"):
        plan_pair(target, as_draft(parallel), PlacementSettings())
    with pytest.raises(SettingError, match="has a tokenizer without a token of model="):
        plan_pair(target, as_draft(other), PlacementSettings())


def test_probabilities_along_a_text_are_those_of_proposals() -> None:
    """The draft lacks token 8, and writes it as two of its own."""
    text = [1, 2, 11, 4, 8, 5, 3]
    drafter = TranslatedDrafter(MarkovRunner(own_chain(1)), toy(), Warp())
    found = draft_probabilities_by_replay(drafter, [1, 2, *text], range(2, 9), None, 2, SIZE)
    assert found[3, 0] == 0
    for place in (0, 2, 4):
        drafter.start([[1, 2, *text[:place]]], text[place : place + 1], Step(torch.empty(0)))
        proposal = drafter.propose(1, torch.rand(1, 1))
        following = text[place + 1]
        assert found[place, 0] == pytest.approx(proposal.probabilities[0, 0, following].item())
    assert found[0, 1] == pytest.approx(found[1, 0].item())


def test_a_draft_whose_logits_are_nan_is_reported() -> None:
    """Of nan the last token of its vocabulary is drawn, which the target may lack."""
    lacking = Translation({token: token for token in range(7)}, list, lambda token: [token], SIZE)
    own = torch.full((OWN_SIZE, OWN_SIZE), torch.nan)
    drafter = TranslatedDrafter(MarkovRunner(own), lacking, Warp(1.0))
    with pytest.raises(NonFiniteError, match="draft"):
        list(speculative(MarkovRunner(chain(0)), drafter, requests(RAGGED, length=10), 2))
