"""A draft model as drafter: token by token, with the target's tokenizer.

`parallel` drafts all tokens in one pass, `translated` has another tokenizer, and `model_trees`
drafts trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.transfer import Arriving, added, padded, to_device, to_host
from harness.decoding.warp import AnyWarp
from harness.drafting.teacher_forcing import own_probabilities, windows


class ModelDrafter(Drafter):
    """Proposes by running a draft model token by token.

    The runner's cache lacks the last tokens of the text, `_unseen`, with which the next proposal
    begins. Say it was fed `a`, and drew b, c and d. To draw d it was fed b and c, but never d
    itself:

        accepted b, then x         the cache keeps `a b`, and lacks `x`
        accepted b, c, d, then x   the cache keeps `a b c`, and lacks `d x`

    To keep the batch rectangular, all rows lack two tokens as soon as one does, or may while the
    host has not read the verdict. The other rows give a cached token back: the first one then lacks
    `b x`. Tokens that were decided without a proposal are unseen, too. Where rows took tokens of
    another drafter, rows lack different numbers of tokens, and all catch up before the next proposal.

    Args:
        runner: the draft model's.
        warp: the one applied to the target's logits.
        device: the target's, where proposals are used.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp, device: torch.device | str = "cpu") -> None:
        self._runner = runner
        self._warp = warp
        self._device = device
        # [B, at least 1] decided tokens that the runner has not been fed.
        self._unseen = torch.empty(0)
        # In place of `_unseen` after verdicts in a hybrid, when each row may lack another number of
        # tokens; else None.
        self._unseen_of_rows: list[list[int]] | None = None
        # The runner's own proposal [B, K], until its verdict.
        self._proposed = torch.empty(0)
        # What `replace` was given: a function that returns the tokens of all rows, once they are on
        # the host, and which rows take another drafter's.
        self._replacement: tuple[Callable[[], list[list[int]]], Sequence[bool]] | None = None
        # The largest K so far.
        self._most_drafted = 1

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._unseen_of_rows = None
        self._replacement = None
        self._forget_proposal()

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._catch_up()
        # New rows lack one token, so all others must.
        num_rows, num_unseen = self._unseen.shape
        if num_unseen > 1:
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([num_unseen - 1] * num_rows)
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        self._unseen = torch.cat([self._unseen[:, -1:], new])
        self._forget_proposal()

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self._catch_up()
        self._most_drafted = max(self._most_drafted, num_draft_tokens)
        uniforms = uniforms.to(self._unseen.device)
        self._proposed, probabilities = self._runner.draw(self._unseen, uniforms, self._warp)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def replace(self, tokens: Tensor, replaced: Sequence[bool]) -> None:
        self._replacement = to_host(tokens), replaced

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if self._unseen_of_rows is not None or self._replacement is not None:
            self._observe_rows(num_accepted, next_tokens)
            return
        device = self._unseen.device
        num_unseen = self._unseen.shape[1]
        num_proposed = self._proposed.shape[1]
        next_token = to_device(next_tokens, device).unsqueeze(1)
        if num_proposed == 0:
            self._unseen = torch.cat([self._unseen, next_token], dim=1)
            return
        has_arrived = not isinstance(num_accepted, Arriving)
        if has_arrived and max(num_accepted) < num_proposed:
            # The runner was fed all tokens that were accepted.
            self._runner.keep(added(num_accepted, num_unseen))
            self._unseen = next_token
        else:
            self._runner.keep(added(num_accepted, num_unseen - 1))
            self._leave_two_unseen(num_accepted, next_token)
        self._forget_proposal()

    def along(
        self, prompt: Sequence[int], text: Sequence[int], hidden: Tensor | None, most: int
    ) -> Tensor:
        device = self._runner.start([prompt]).logits.device
        return windows(
            own_probabilities(self._runner, self._warp, prompt, text[:-1], text[1:], device), most
        )

    def _leave_two_unseen(self, num_accepted: Sequence[int], next_token: Tensor) -> None:
        """Count all as seen but the last accepted token and the next one [B, 1]."""
        text = torch.cat([self._unseen[:, -1:], self._proposed], dim=1)
        places = to_device(num_accepted, text.device).unsqueeze(1)
        self._unseen = torch.cat([text.gather(1, places), next_token], dim=1)

    def select(self, rows: Sequence[int]) -> None:
        # Rows leave after `observe`, which has used up the replacement.
        self._runner.select(rows)
        index = to_device(rows, self._unseen.device)
        self._unseen = self._unseen[index]
        self._proposed = self._proposed[index]
        if self._unseen_of_rows is not None:
            self._unseen_of_rows = [self._unseen_of_rows[row] for row in rows]

    def _forget_proposal(self) -> None:
        self._proposed = self._unseen[:, :0]

    def _observe_rows(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        """Remember what was decided, each row by itself: one that took another drafter's tokens was
        fed none of them.
        """
        num_rows, num_unseen = self._unseen.shape
        num_proposed = self._proposed.shape[1]
        proposed: list[list[int]] = [[] for _ in range(num_rows)]
        replaced: Sequence[bool] = [True] * num_rows
        if self._replacement is not None:
            read_tokens, replaced = self._replacement
            proposed = read_tokens()

        # The accepted tokens that the runner was fed: never the last it proposed, and none where
        # another drafter's took the place of its own.
        num_fed = [0] * num_rows
        for row in range(num_rows):
            if num_proposed > 0 and not replaced[row]:
                num_fed[row] = min(num_accepted[row], num_proposed - 1)
        if num_proposed > 0:
            self._runner.keep([num_unseen + count for count in num_fed])
            unseen: list[list[int]] = [[] for _ in range(num_rows)]
        elif self._unseen_of_rows is None:
            unseen = self._unseen.tolist()
        else:
            unseen = self._unseen_of_rows
        for row in range(num_rows):
            not_fed = proposed[row][num_fed[row] : num_accepted[row]]
            unseen[row] = [*unseen[row], *not_fed, next_tokens[row]]
        self._unseen_of_rows = unseen
        self._replacement = None
        self._forget_proposal()

    def _catch_up(self) -> None:
        """Feed all unseen tokens but each row's last, where rows lack different numbers of them.

        A pass pads rows by no more than a proposal is long: a cache has room for that, as each row
        has slots for a proposal behind its text.
        """
        if self._unseen_of_rows is None:
            return
        unseen = self._unseen_of_rows
        device = self._unseen.device
        while max(map(len, unseen)) > 1:
            num_missing = [len(tokens) - 1 for tokens in unseen]
            width = min(max(num_missing), max(min(num_missing), self._most_drafted))
            counts = [min(number, width) for number in num_missing]
            fed = [tokens[:count] for tokens, count in zip(unseen, counts, strict=True)]
            self._runner.extend(to_device(padded(fed, width), device))
            self._runner.keep(counts)
            unseen = [tokens[count:] for tokens, count in zip(unseen, counts, strict=True)]
        last_tokens = [tokens[0] for tokens in unseen]
        self._unseen = to_device(last_tokens, device).unsqueeze(1)
        self._unseen_of_rows = None
        self._forget_proposal()
