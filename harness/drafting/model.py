"""A draft model as drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.decoding.protocols import Drafter, Proposal, Runner, Step
from harness.decoding.transfer import Arriving, added, to_device, to_host
from harness.decoding.warp import AnyWarp


class ModelDrafter(Drafter):
    """Proposes by running a draft model token by token.

    The runner's cache trails the decided sequence by one token or by two (the last draft token was never fed to the
    draft model itself; it is missing where all K were accepted). To keep the batch rectangular, all rows trail by two
    as soon as one does, or may while the host has not read the verdict: the others give one cached token back and feed
    it again. Tokens that were decided without a proposal are fed with the next one.
    Where rows took tokens of another drafter, each trails by a number of its own, and all catch up
    before the next proposal.

    `warp` is the one applied to the target's logits; `device` is the target's, where proposals are used.
    """

    layers = ()

    def __init__(self, runner: Runner, warp: AnyWarp, device: torch.device | str = "cpu") -> None:
        self._runner = runner
        self._warp = warp
        self._device = device
        self._unseen = torch.empty(
            0
        )  # [B, at least 1] decided tokens that the runner has not been fed
        self._proposed = torch.empty(0)  # [B, K]
        # Decided tokens of each row that the runner has not been fed, in place of `_unseen`.
        self._late: list[list[int]] | None = None
        # Tokens that another drafter proposes, in a transfer that has begun, and the rows that take
        # them.
        self._replacement: tuple[Callable[[], list[list[int]]], Sequence[bool]] | None = None
        self._most_drafted = 1

    def start(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        logits = self._runner.start(prompts).logits
        self._unseen = to_device(first_tokens, logits.device).unsqueeze(1)
        self._proposed = self._unseen[:, :0]
        self._late = self._replacement = None

    def add(
        self, prompts: Sequence[Sequence[int]], first_tokens: Sequence[int], step: Step
    ) -> None:
        self._catch_up()
        if (missing := self._unseen.shape[1] - 1) > 0:  # new rows trail by one
            self._runner.extend(self._unseen[:, :-1])
            self._runner.keep([missing] * len(self._unseen))
        self._runner.add(prompts)
        new = to_device(first_tokens, self._unseen.device).unsqueeze(1)
        self._unseen = torch.cat([self._unseen[:, -1:], new])
        self._proposed = self._unseen[:, :0]

    def propose(self, num_draft_tokens: int, uniforms: Tensor) -> Proposal:
        self._catch_up()
        self._most_drafted = max(self._most_drafted, num_draft_tokens)
        uniforms = uniforms.to(self._unseen.device)
        self._proposed, probabilities = self._runner.draw(self._unseen, uniforms, self._warp)
        return Proposal(self._proposed.to(self._device), probabilities.to(self._device))

    def replace(self, tokens: Tensor, replaced: Sequence[bool]) -> None:
        """See `FollowingDrafter.replace`."""
        self._replacement = to_host(tokens), replaced

    def observe(self, num_accepted: Sequence[int], next_tokens: Sequence[int], step: Step) -> None:
        if self._late is not None or self._replacement is not None:
            self._observe_late(num_accepted, next_tokens)
            return
        device = self._unseen.device
        num_unseen, num_proposed = self._unseen.shape[1], self._proposed.shape[1]
        next_token = to_device(next_tokens, device).unsqueeze(1)
        if not num_proposed:
            self._unseen = torch.cat([self._unseen, next_token], dim=1)
            return
        proposed, self._proposed = self._proposed, self._proposed[:, :0]
        if not isinstance(num_accepted, Arriving) and max(num_accepted) < num_proposed:
            self._runner.keep(added(num_accepted, num_unseen))
            self._unseen = next_token
            return
        self._runner.keep(added(num_accepted, num_unseen - 1))
        fed = torch.cat([self._unseen[:, -1:], proposed], dim=1)
        before_next = fed.gather(1, to_device(num_accepted, device).unsqueeze(1))
        self._unseen = torch.cat([before_next, next_token], dim=1)

    def select(self, rows: Sequence[int]) -> None:
        self._runner.select(rows)
        index = to_device(rows, self._unseen.device)
        self._unseen, self._proposed = self._unseen[index], self._proposed[index]
        if self._late is not None:
            self._late = [self._late[row] for row in rows]

    def _observe_late(self, num_accepted: Sequence[int], next_tokens: Sequence[int]) -> None:
        """Remember what was decided, however many tokens a row gained."""
        num_rows, num_unseen = self._unseen.shape
        num_proposed = self._proposed.shape[1]
        proposed: list[list[int]] = [[] for _ in range(num_rows)]
        replaced: Sequence[bool] = [True] * num_rows
        if self._replacement is not None:
            read_proposed, replaced = self._replacement
            proposed = read_proposed()
        num_fed = [
            0 if is_replaced else min(count, num_proposed - 1)
            for count, is_replaced in zip(num_accepted, replaced, strict=True)
        ]
        late = self._unseen.tolist() if self._late is None else self._late
        if num_proposed:
            self._runner.keep([num_unseen + count for count in num_fed])
            late = [[] for _ in range(num_rows)]
        gained = zip(late, proposed, num_fed, num_accepted, next_tokens, strict=True)
        self._late = [
            [*before, *tokens[begin:end], following]
            for before, tokens, begin, end, following in gained
        ]
        self._proposed, self._replacement = self._proposed[:, :0], None

    def _catch_up(self) -> None:
        """Feed all late tokens but each row's last.

        Rows are padded by no more than a proposal is long: a cache has room for that.
        """
        if self._late is None:
            return
        late, self._late = self._late, None
        device = self._unseen.device
        while (longest := max(map(len, late)) - 1) > 0:
            shortest = min(map(len, late)) - 1
            width = min(longest, max(shortest, self._most_drafted))
            counts = [min(len(row) - 1, width) for row in late]
            padded: list[int] = []
            for row, count in zip(late, counts, strict=True):
                padded += row[:count] + [0] * (width - count)
            self._runner.extend(to_device(padded, device).view(len(late), width))
            self._runner.keep(counts)
            late = [row[count:] for row, count in zip(late, counts, strict=True)]
        self._unseen = to_device([last for (last,) in late], device).unsqueeze(1)
        self._proposed = self._unseen[:, :0]
