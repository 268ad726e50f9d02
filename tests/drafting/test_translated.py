"""Drafts with another tokenizer: the target's distribution stays what it is, whatever the vocabularies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chains import GREEDY, RAGGED, SIZE, chain, request, texts
from fakes import MarkovRunner
from harness.config.settings import ModelSettings
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import Step
from harness.decoding.warp import Warp
from harness.drafting.translated import TranslatedDrafter, Translation
from harness.drafting.translation import translation
from in_process import Harness, results
from tiny_checkpoints import make_tokenizer, spaced_tokenizer

OWN_SIZE = 10


def toy(name: str) -> Translation:
    """Token t is the draft's 9 - t for t < 7; the target's others are two of the draft's, or wait for a second one."""
    common = {token: OWN_SIZE - 1 - token for token in range(7)}

    def into_draft(tokens: Sequence[int]) -> list[int]:
        if tokens[-1] == 11 and len(tokens) < 3:
            return []
        return [
            own
            for token in tokens
            for own in ([common[token]] if token in common else [1, token % 3])
        ]

    def into_target(tokens: Sequence[int]) -> list[int]:
        back = {own: token for token, own in common.items()}
        return [back.get(own, 7 + own % 2) for own in tokens if own != 2]

    return Translation(
        common,
        into_draft_of_prompt(into_draft),
        into_draft,
        into_target,
        SIZE,
        name,
    )  # type: ignore[arg-type]


def into_draft_of_prompt(
    into_draft: Callable[[Sequence[int]], list[int]],
) -> Callable[[Sequence[int]], list[int]]:
    return lambda tokens: into_draft([*tokens, 0])


def own_chain(seed: int) -> Tensor:
    return torch.randn(OWN_SIZE, OWN_SIZE, generator=torch.Generator().manual_seed(seed)).softmax(
        -1
    )


def sharp_chain() -> Tensor:
    """The draft's version of the target `chain(0)`, so far as it knows its tokens."""
    own = own_chain(0)
    for token in range(7):
        for following in range(7):
            own[9 - token, 9 - following] = chain(0)[token, following]
    return own / own.sum(-1, keepdim=True)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", ["intersection", "text"])
@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one row", "ragged rows"])
def test_greedy_output_is_the_regular_one(name: str, k: int, prompts: list[list[int]]) -> None:
    what = request(prompts, length=30, stop=[8])
    drafter = TranslatedDrafter(MarkovRunner(sharp_chain()), toy(name), GREEDY)
    iterations = list(speculative(MarkovRunner(chain(0)), drafter, what, k))
    assert texts(iterations, len(prompts)) == texts(
        autoregressive(MarkovRunner(chain(0)), what), len(prompts)
    )
    assert any(count for iteration in iterations for count in iteration.num_accepted)


class Checked(TranslatedDrafter):
    """Compares what its runner has been fed with the whole text."""

    def start(self, prompts, first_tokens, step):  # type: ignore[no-untyped-def]
        super().start(prompts, first_tokens, step)
        self.whole = [self._translation.prompt_into_draft(prompt) for prompt in prompts]
        self.waiting: list[list[int]] = [[] for _ in prompts]
        self.learn([[token] for token in first_tokens])

    def learn(self, decided: Sequence[Sequence[int]]) -> None:
        for row, tokens in enumerate(decided):
            self.waiting[row] += tokens
            if read := self._translation.into_draft(self.waiting[row]):
                self.whole[row] += read
                self.waiting[row] = []

    def observe(self, num_accepted, next_tokens, step):  # type: ignore[no-untyped-def]
        kept = zip(self._rows, num_accepted, next_tokens, strict=True)
        self.learn([[*row.offered[:count], last] for row, count, last in kept])
        super().observe(num_accepted, next_tokens, step)
        for seen, row, whole in zip(self._runner.rows, self._rows, self.whole, strict=True):  # type: ignore[attr-defined]
            assert seen + row.unread == whole

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.whole, self.waiting = (
            [self.whole[row] for row in rows],
            [self.waiting[row] for row in rows],
        )


def test_the_draft_model_reads_the_whole_text() -> None:
    drafter = Checked(MarkovRunner(sharp_chain()), toy("intersection"), Warp(1.0))
    what = request(RAGGED, Warp(1.0), length=60, stop=[8])
    iterations = list(speculative(MarkovRunner(chain(0)), drafter, what, 3))
    assert {0, 1, 2} <= {count for iteration in iterations for count in iteration.num_accepted}


class Unmapped(TranslatedDrafter):
    """The broken twin: probabilities at the draft's own places instead of the target's."""

    def _over_target(self, probabilities: Tensor) -> Tensor:
        return super()._over_target(probabilities).roll(1, -1)


@pytest.mark.parametrize(
    ("kind", "name", "lossless"),
    [
        (TranslatedDrafter, "intersection", True),
        (TranslatedDrafter, "text", True),
        (Unmapped, "intersection", False),
    ],
)
def test_sampling_follows_the_target(
    kind: type[TranslatedDrafter], name: str, lossless: bool
) -> None:
    num_rows, warp, target = 5_000, Warp(1.0), chain(0, 1.0)
    drafter = kind(MarkovRunner(own_chain(1)), toy(name), warp)
    what = request([[3]] * num_rows, warp, length=4, indices=range(num_rows))
    found = texts(speculative(MarkovRunner(target), drafter, what, 2), num_rows)
    p_values = []
    for place in (1, 2, 3):
        seen = torch.tensor(found)[:, place].bincount(minlength=SIZE).double()
        exact = torch.linalg.matrix_power(target.double(), place + 1)[3] * num_rows
        p_values.append(stats.chisquare(seen, exact * seen.sum() / exact.sum()).pvalue)
    assert (min(p_values) > 1e-9) == lossless


def trained_tokenizer(corpus: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["</s>"]),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_tokens_are_compared_by_their_bytes() -> None:
    target, draft = make_tokenizer(), trained_tokenizer(["höher und höher und höher"] * 9, 270)
    found = translation(target, draft, 320)
    assert found.method == "intersection"
    for one, own in found.common.items():
        if one != target.eos_token_id:
            assert target.convert_ids_to_tokens(one) == draft.convert_ids_to_tokens(own)
    assert found.common[target.eos_token_id] == draft.eos_token_id
    text = " höher €"
    tokens = target(text)["input_ids"]
    assert draft.decode(found.into_draft(tokens)) == text
    assert target.decode(found.into_target(draft(text)["input_ids"])) == text
    back = translation(draft, target, 320)
    begin = draft(" höher")["input_ids"]
    assert target.decode(back.into_draft(begin)) == " höher", "tokens that it lacks are spelt"
    assert translation(target, spaced_tokenizer(), 320).method == "text"


def test_a_character_that_is_decided_in_two_parts_is_translated_whole() -> None:
    """The draft lacks the target's tokens of bytes; five of them end within the third character."""
    target, draft = trained_tokenizer([], 257), spaced_tokenizer()
    found = translation(target, draft, 257)
    tokens = target("ööö")["input_ids"]
    assert len(tokens) == 6
    assert found.into_draft(tokens[:5]) == []
    assert found.into_draft(tokens) == draft("ööö", add_special_tokens=False)["input_ids"]
    # Bytes that no further one can complete are not waited for.
    assert found.into_draft([tokens[0]] * 3) == []
    assert found.into_draft([*target("a")["input_ids"], *[tokens[0]] * 4])


SaveModel = Callable[..., ModelSettings]


@pytest.mark.parametrize("name", ["intersection", "text"])
def test_from_the_command_line(
    harness: Harness, save_model: SaveModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / "prompts.txt").write_text(
        "one\ntwo words\nfour four four four\nhöher €\n", encoding="utf-8"
    )
    tokenizer = (
        trained_tokenizer(["two words four four"] * 9, 270)
        if name == "intersection"
        else spaced_tokenizer()
    )
    target = save_model("llama", "model")
    draft = save_model(
        "gpt2", "draft", tokenizer=tokenizer, vocab_size=len(tokenizer), n_positions=256
    )
    pair = [f"model={target.name}", f"draft={draft.name}", "prompts=prompts.txt"]
    quick = [
        "num_prompts=4",
        "batch_size=2",
        "num_warmup=0",
        "decoding=greedy",
        "decoding.max_new_tokens=10",
    ]
    outcome = harness("latency", *pair, *quick)
    assert f"draft {draft.name}: another tokenizer; it" in outcome.stderr
    row = results().iloc[-1]
    assert row["identical_prompts"] == 4
    assert row["translation"] == name
    outcome = harness("latency", *pair, *quick, "engine=huggingface", "batch_size=1")
    row = results().iloc[-1]
    assert (row["engine"], row["identical_prompts"]) == ("huggingface", 4)


def test_probabilities_along_a_text_are_those_of_proposals() -> None:
    """Token 11 is half a character for the draft: after it nothing is offered. It lacks token 8."""
    text = [1, 2, 11, 4, 8, 5, 3]
    drafter = TranslatedDrafter(MarkovRunner(own_chain(1)), toy("intersection"), Warp())
    found = drafter.along([1, 2], text, None, 2)
    assert found[2].isnan().all()
    assert found[3, 0] == 0
    drafter.start([[1, 2]], [1], Step(torch.empty(0)))
    proposal = drafter.propose(1, torch.rand(1, 1))
    assert proposal.probabilities is not None
    assert found[0, 0] == pytest.approx(proposal.probabilities[0, 0, 2].item())
    assert found[0, 1] == found[1, 0]

    drafter = TranslatedDrafter(MarkovRunner(own_chain(1)), toy("text"), Warp())
    drafter.start([[1, 2, *text[:1]]], [2], Step(torch.empty(0)))
    tokens = drafter.propose(3, torch.rand(1, 3)).tokens[0].tolist()
    found = drafter.along([1, 2], [1, 2, *tokens, 0], None, 3)
    assert found[1, : len(tokens)].eq(1).all()
