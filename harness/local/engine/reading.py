"""Reads existing texts with both models of a pair (teacher forcing), to compute how often the draft is accepted.

The target and a draft model read a text in passes of at most `CHUNK` tokens. Any other drafter replays the text: after
each token of an answer it makes a proposal, in which the text's own tokens replace the tokens that it would draw.
`results.statistics.iterations` computes acceptance from the probabilities that target and draft give to the tokens.

`drafting_wrong` imitates an engine that drafts with a known mistake.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.door.reading import DraftMistake, ReadText, Transcript, num_together
from harness.engines.protocol import in_batches
from harness.engines.record import Preparation
from harness.local.decoding.iteration import drafted
from harness.local.decoding.protocols import (
    Drafter,
    NonFiniteError,
    Proposal,
    Runner,
    Step,
    TensorDrafter,
    TokenRows,
)
from harness.local.decoding.state import Column, RowState
from harness.local.decoding.transfer import padded
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.checked import blaming_method
from harness.local.drafting.method import Pair, SampledDraftSettings
from harness.local.drafting.model import ModelDrafter
from harness.local.engine.reference import changed_embeddings, not_finite, steps_along
from harness.local.engine.runners import open_runners, warp_of
from harness.results.statistics.iterations import acceptance_chances, cut

# The number of tokens that one pass reads, in all texts together. It is limited because the logits and probabilities of
# all these tokens are in memory at the same time.
CHUNK = 256


class PairReader:
    """Reads texts with a pair.

    Args:
        pair: the loaded models.
        decoding: the temperature, top-k, top-p and acceptance rule.
        most: the largest K.
        greedy_draft: whether the draft proposes its likeliest tokens, whatever its settings are.
        with_rounding: whether texts are read a second time with embeddings that are changed by as little as rounding.
        is_late: whether a head gets the hidden states of the token before each token, instead of those of the token.
            (This imitates a mistake of engines.)
    """

    def __init__(
        self,
        pair: Pair,
        decoding: DecodingSettings,
        most: int,
        *,
        greedy_draft: bool = False,
        with_rounding: bool = False,
        is_late: bool = False,
    ) -> None:
        if greedy_draft:
            assert isinstance(pair.draft_settings, SampledDraftSettings)
            greedy = dataclasses.replace(pair.draft_settings, sampling="greedy")
            pair = dataclasses.replace(pair, draft_settings=greedy)
        self._pair = pair
        self._most = most
        self._with_rounding = with_rounding
        self._is_late = is_late
        self._is_block = decoding.rule == "block"
        self._warp = warp_of(decoding)
        self._runners = open_runners(pair, Preparation(decoding=decoding, runner="static"))
        self._drafter = self._runners.make_drafter(self._warp)

    def close(self) -> None:
        """Free the caches."""
        self._runners.close()

    def read(self, transcripts: Iterable[Transcript]) -> Iterator[list[ReadText]]:
        """Read the answers of transcripts. Yields a list for each transcript, in order, with one `ReadText` per answer.

        Consecutive transcripts with the same prompt are read together.

        Raises:
            SettingError: the draft draws its tokens in a way that cannot replay a text.
            RunError: a model gives logits that are nan or infinite, or a user's draft method fails.
        """
        by_prompt = itertools.groupby(transcripts, key=lambda transcript: list(transcript.prompt))
        for _, group in by_prompt:
            same_prompt = list(group)
            longest = max(len(transcript.token_ids) for transcript in same_prompt)
            for together in in_batches(same_prompt, num_together(longest)):
                try:
                    read = [*self._read_together(together)]
                    if self._with_rounding:
                        read = self._rounded(together, read)
                except NonFiniteError as error:
                    token = f"token {error.position} of a text"
                    raise not_finite(self._pair, error.role, token) from error
                yield from read

    def _rounded(
        self, transcripts: Sequence[Transcript], read: Sequence[Sequence[ReadText]]
    ) -> list[list[ReadText]]:
        """Read transcripts again, with slightly changed embeddings of both models. Returns the texts of `read`, with
        their attribute `rounded` set.
        """
        with ExitStack() as changes:
            changes.enter_context(changed_embeddings(self._pair.target.model))
            if self._pair.draft is not None:
                changes.enter_context(changed_embeddings(self._pair.draft.model))
            again = [*self._read_together(transcripts)]
        return [
            [
                dataclasses.replace(text, rounded=changed.cut)
                for text, changed in zip(texts, texts_again, strict=True)
            ]
            for texts, texts_again in zip(read, again, strict=True)
        ]

    @torch.inference_mode()
    def _read_together(self, transcripts: Sequence[Transcript]) -> Iterator[list[ReadText]]:
        """Read transcripts that have the same prompt. Each pass of the target reads tokens of all of them."""
        texts = [transcript.token_ids for transcript in transcripts]
        prompt = transcripts[0].prompt
        # Shorter texts are padded. The figures of the padding are not used.
        rows = padded([text[len(prompt) :] for text in texts])
        hidden: list[Tensor] = []
        # Three figures for each token after the prompt: its probability, and the mean and the variance of the
        # log-probability of a token that the target draws at the same position.
        parts: list[Tensor] = []
        prompts = [prompt] * len(texts)
        width = max(1, CHUNK // len(texts))
        for step, upcoming in steps_along(self._runners.target, prompts, rows, width):
            if step.hidden is not None:
                hidden.append(step.hidden)
            probabilities = self._warp(step.logits)
            logarithms = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
            means = (probabilities * logarithms).sum(-1)
            squares = (probabilities * logarithms.square()).sum(-1)
            variances = (squares - means.square()).clamp(min=0)
            given = _chosen(probabilities, upcoming)
            parts.append(torch.stack([given, means, variances], dim=-1).double())
        figures = torch.cat(parts, dim=1)
        for row, transcript in enumerate(transcripts):
            features = torch.cat([states[row] for states in hidden]) if hidden else None
            if self._is_late and features is not None:
                # The features of the tokens a, b, c become those of a, a, b.
                features = torch.cat([features[:1], features[:-1]])
            read_texts = []
            for answer in transcript.answers:
                first = answer.start - len(prompt)
                answer_figures = figures[row, first : first + len(answer)]
                _require_finite("model", answer_figures, answer.start)
                tokens = transcript.token_ids[: answer.stop]
                draft = self._draft_probabilities(tokens, answer, features)
                read_texts.append(self._read_text(answer_figures, draft))
            yield read_texts

    def _draft_probabilities(
        self, tokens: Sequence[int], answer: range, features: Tensor | None
    ) -> Tensor:
        """Return the draft's probabilities [len(answer) - 1, K], as `draft_probabilities_by_replay` does."""
        settings = self._pair.draft_settings
        # A draft model drafts token by token, so it reads the text faster in chunks than by replaying it. (A subclass
        # that a user wrote may draft differently, and is replayed.)
        if type(self._drafter) is ModelDrafter:
            return draft_probabilities_by_chunk(
                self._drafter.runner, self._drafter.warp, tokens, answer, self._most
            )
        with blaming_method(settings):
            probabilities = draft_probabilities_by_replay(
                on_host(self._drafter, self._most, len(tokens) + self._most + 1),
                tokens,
                answer,
                features,
                self._most,
                self._pair.vocabulary_size,
            )
        if probabilities is None:
            # Only users' drafters can lack this.
            rule = "must draw by harness.local.decoding.randomness.existing_index, so that texts can be replayed"
            raise SettingError("draft", rule, settings and settings.name)
        return probabilities

    def _read_text(self, figures: Tensor, draft: Tensor) -> ReadText:
        """Return the results for an answer.

        Args:
            figures: [len(answer), 3], the figures of each token, as `_read_together` computes them.
            draft: [len(answer) - 1, K], as `_draft_probabilities` returns them.
        """
        target, means, variances = figures.unbind(-1)
        chances = acceptance_chances(
            target.cpu().numpy(), draft.cpu().numpy(), block=self._is_block
        )
        # Tokens of probability 0 have no finite log-probability, and are counted separately.
        possible = target > 0
        return ReadText(
            cut=cut(chances),
            num_tokens=len(target),
            num_impossible=int((~possible).sum()),
            log_probability=float(target[possible].log().sum()),
            expected=float(means[possible].sum()),
            variance=float(variances[possible].sum()),
        )


def _require_finite(role: str, figures: Tensor, first: int) -> None:
    """Raise a NonFiniteError if one of the figures [n, ...] is not finite. (Later code would take nan for a token that
    is not offered or cannot be drawn.)

    Args:
        role: the model that gave the figures, `model` or `draft`.
        figures: the figures of n consecutive tokens.
        first: the index of the first of these tokens in the text.
    """
    are_finite = figures.unsqueeze(-1).flatten(1).isfinite().all(-1).tolist()
    if not all(are_finite):
        raise NonFiniteError(role, first + are_finite.index(False))


def _chosen(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities [..., m] that distributions [..., m, V] give to tokens [..., m]; 0 for tokens that are
    V or larger.
    """
    is_known = tokens < probabilities.shape[-1]
    index = tokens.where(is_known, 0).unsqueeze(-1)
    return probabilities.gather(-1, index).squeeze(-1) * is_known


def draft_probabilities_by_chunk(
    runner: Runner, warp: AnyWarp, tokens: Sequence[int], answer: range, most: int
) -> Tensor:
    """Read a text with a draft model. Its probabilities do not depend on the token at which an iteration began, so each
    token is read only once.

    Args:
        tokens: the tokens of prompt and answer.
        answer: the answer's indices in `tokens`. Index 0 must not be among them.
        most: the largest K.

    Returns:
        Probabilities [len(answer) - 1, most], as `draft_probabilities_by_replay` returns them. Here, entry (s, j)
        equals entry (s + j, 0): if the tokens' probabilities are a, b, c and most=2, the rows are [a, b], [b, c] and
        [c, nan].

    Raises:
        NonFiniteError: the draft gives probabilities that are not finite.
    """
    first = answer.start + 1
    parts = []
    rows = [tokens[first : answer.stop]]
    for step, upcoming in steps_along(runner, [tokens[:first]], rows, CHUNK):
        parts.append(_chosen(warp(step.logits), upcoming)[0])
    probabilities = torch.cat(parts)
    _require_finite("draft", probabilities, first)
    beyond = probabilities.new_full((most - 1,), torch.nan)
    # The view is copied, because its rows share their entries.
    return torch.cat([probabilities, beyond]).unfold(0, most, 1).clone()


def draft_probabilities_by_replay(
    drafter: Drafter,
    tokens: Sequence[int],
    answer: range,
    hidden: Tensor | None,
    most: int,
    vocabulary_size: int,
) -> Tensor | None:
    """Replay an answer: after each token of the answer except the last, let the drafter propose `most` tokens, and then
    tell it that the text's own next token was decided.

    Args:
        tokens: the tokens of prompt and answer.
        answer: the answer's indices in `tokens`. Index 0 must not be among them.
        hidden: [at least len(tokens) - 1, L, D], the target's hidden states from the L layers that the drafter reads;
            None if it reads none.
        most: the largest K.
        vocabulary_size: the width of the target's logits. (Drafters do not read the logits themselves.)

    Returns:
        Probabilities [len(answer) - 1, most]. Entry (s, j) belongs to an iteration that begins after token s of the
        answer. It is the probability with which the draft proposes the text's own token as draft token j, given that
        the draft tokens before it are the text's tokens too. It is nan if no such token is offered, and after the end
        of the text.

        None if the drafter does not draw with `randomness.existing_index`, because then it does not propose the text's
        tokens.

    Raises:
        NonFiniteError: the draft gives probabilities that are not finite.
    """
    first = answer.start
    logits = torch.empty(1, vocabulary_size)
    begun = Step(logits, None if hidden is None else hidden[:first].unsqueeze(0))
    drafter.start([tokens[:first]], [tokens[first]], begun)
    replay = torch.full((len(answer) - 1, most), torch.nan)
    for number, index in enumerate(answer[:-1]):
        upcoming = tokens[index + 1 : index + 1 + most]
        # Whole numbers in place of random numbers are the tokens to draw (`randomness.are_tokens`). After the end of
        # the text, any token will do.
        wanted = torch.tensor([*upcoming, *[0] * (most - len(upcoming))])
        proposal = drafter.propose(most, wanted.unsqueeze(0))
        proposed = proposal.tokens[0].cpu()
        num_offered = len(proposed) if proposal.lengths is None else int(proposal.lengths[0])
        # Further tokens are padding, or behind the end of the text.
        num_offered = min(num_offered, len(upcoming))
        wanted = wanted[:num_offered]
        is_taken = proposed[:num_offered] == wanted
        # A deterministic drafter proposes each of its tokens with probability 1, and so the text's token with 1 or 0.
        probabilities = is_taken.float()
        if proposal.probabilities is not None:
            distributions = proposal.probabilities[0, :num_offered].cpu()
            probabilities = _chosen(distributions, wanted)
            # A drafter may propose another token than the text's only if the text's token has probability 0. No later
            # token can be accepted then. (`argmin` finds the first token that is another.)
            if not is_taken.all() and probabilities[int(is_taken.int().argmin())] > 0:
                return None
        _require_finite("draft", probabilities, index + 1)
        replay[number, :num_offered] = probabilities
        states = None if hidden is None else hidden[index].unsqueeze(0).unsqueeze(0)
        drafter.observe([0], [[tokens[index + 1]]], Step(logits.unsqueeze(1), states))
    return replay


def drafting_wrong(pair: Pair, mistake: DraftMistake) -> Pair | None:
    """Return the pair with a mistake in its draft; None if its draft cannot have this mistake.

    Only heads that read hidden states can have these mistakes. For the mistake `late` the pair is returned unchanged,
    because `PairReader` makes this mistake (`is_late`).
    """
    if pair.head is None or not pair.head.config.target_layers:
        return None
    # A shallow copy, which shares all weights with the head.
    head: Any = copy.copy(pair.head)
    if mistake == "no mapping":
        if head.d2t is None:
            return None
        # A new dict is needed, because the shallow copy shares the dict of the original head. Offsets of 0 mean that
        # draft tokens are taken for target tokens with the same ids.
        head._buffers = head._buffers | {"d2t": torch.zeros_like(head.d2t)}
    elif mistake != "late":
        layers = head.config.target_layers
        last = pair.target.model.config.get_text_config(decoder=True).num_hidden_layers
        wrong_layers = {
            "layers before": tuple(layer - 1 for layer in layers),
            "layers behind": tuple(layer + 1 for layer in layers),
            # The default layers of EAGLE-3's authors.
            "usual layers": (2, last // 2, last - 3),
            "last layer": (last,) * len(layers),
        }[mistake]
        is_possible = (
            len(wrong_layers) == len(layers) and 0 <= min(wrong_layers) <= max(wrong_layers) <= last
        )
        if wrong_layers == layers or not is_possible:
            return None
        head.config = dataclasses.replace(head.config, target_layers=wrong_layers)
    return dataclasses.replace(pair, head=head)


class OnHost(Drafter):
    """Adapts a `TensorDrafter` to the interface of a `Drafter`, which is told on the host what was decided. Like a
    loop, it keeps the state of a batch's rows, which the `TensorDrafter` reads.

    Args:
        num_draft_tokens: the largest K.
        num_slots: as for `TensorDrafter.make_room`.
    """

    def __init__(self, drafter: TensorDrafter, num_draft_tokens: int, num_slots: int) -> None:
        self.layers = drafter.layers
        self._drafter = drafter
        self._room = (num_draft_tokens, num_slots)

    def start(self, prompts: TokenRows, first_tokens: Sequence[int], step: Step) -> None:
        self._drafter.make_room(len(prompts), *self._room)
        self._drafter.start(prompts, first_tokens, step)
        num_draft_tokens, _ = self._room
        # Drafters get the random numbers as an argument, and need no limits. So any numbers and limits will do here.
        self._rows = RowState.resting(len(prompts), 1, num_draft_tokens, "cpu")
        for row, (prompt, token) in enumerate(zip(prompts, first_tokens, strict=True)):
            self._rows.begin(row, prompt, token, most=1, uniforms=self._rows.uniforms[row])
        self._know_lengths()

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        return drafted(self._drafter, self._rows, uniforms)

    def observe(self, num_accepted: Sequence[int], decided: TokenRows, step: Step) -> None:
        tokens = torch.tensor(padded(decided, least=step.logits.shape[1]))
        self._rows.advance(tokens, torch.tensor(num_accepted))
        if step.hidden is not None:
            self._drafter.learn(step.hidden)
        self._know_lengths()

    def _know_lengths(self) -> None:
        self._rows.lengths = self._rows.numbers[Column.LENGTH].tolist()


def on_host(drafter: Drafter | TensorDrafter, num_draft_tokens: int, num_slots: int) -> Drafter:
    """Return a drafter with the interface of a `Drafter`: a `TensorDrafter` is wrapped in `OnHost`, any other drafter
    is returned itself.
    """
    if isinstance(drafter, TensorDrafter):
        return OnHost(drafter, num_draft_tokens, num_slots)
    return drafter
