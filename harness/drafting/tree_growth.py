"""How trees of draft tokens grow, whatever predicts the tokens: dynamic trees, trees of one shape, and
sequences that are drawn independently.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from harness.decoding.randomness import existing_index
from harness.decoding.trees import Parents, TreeProposal, TreeShape, draw_child
from harness.drafting.text_branches import TextBranch, beside, first_tokens, merged

# A dynamic tree expands this many nodes of a level, and looks at as many children of each, as EAGLE-2
# does, where each expansion takes time.
_WIDTH = 10


class Predictor(Protocol):
    """Predicts the tokens after the nodes of growing trees, level by level.

    Attributes:
        width: the most nodes of a level that a dynamic tree expands; None for as many as it can use.
        num_levels: the most levels that can be predicted; None for any number.
    """

    width: int | None = _WIDTH
    num_levels: int | None = None

    def root(self) -> Tensor:
        """Return logits [B, 1, V] after the text."""
        ...

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits [B, n, V] after n nodes of the next level; [B, 1, V] where all are alike.

        Args:
            tokens: [B, n] of these nodes.
            parents: [B, n], the places of their parents among the nodes of the last call.
        """
        ...


@dataclass(frozen=True)
class TreePlan:
    """How a drafter's trees grow.

    Attributes:
        kind: `dynamic` chooses the nodes by the drafter's confidence, in every iteration; `static`
            trees have one shape; `sequences` are drawn independently and merged.
        budget: the most nodes of a tree.
        rates: of a static tree: how often the first, second, ... child of a node is accepted.
        replacement: of sequences: whether several may begin with the same token.
        score_temperature: of dynamic trees: the lowest temperature at which nodes are scored. Greedy
            decoding follows the likeliest token of a good draft far more often than its probability at
            temperature 1 says.
    """

    kind: Literal["static", "dynamic", "sequences"]
    budget: int
    rates: tuple[float, ...] = ()
    replacement: bool = True
    score_temperature: float = 0.1

    def is_deterministic(self, warp: Any) -> bool:
        """Whether trees follow from the texts alone, where tokens are drawn with this warp."""
        return self.kind == "dynamic" or _is_greedy(warp)

    def most_expanded(self, depth: int) -> int:
        """Return the most nodes of a level that are expanded, in trees of this many levels."""
        if self.kind == "dynamic":
            return min(_WIDTH, self.budget)
        if self.kind == "sequences":
            return self.budget // min(depth, self.budget)
        parents = best_shape(self.rates, depth, self.budget)
        levels = TreeShape([parents]).depths[0]
        expanded = {parent for parent in parents if parent}
        return max(Counter(int(levels[node]) for node in expanded).values(), default=0)

    def propose(
        self,
        predictor: Predictor,
        depth: int,
        warp: Any,
        uniforms: Tensor,
        branches: Sequence[TextBranch] = (),
    ) -> TreeProposal:
        """Grow a tree for each row.

        Args:
            depth: the most levels.
            warp: what tokens are drawn with, where a tree is not deterministic.
            uniforms: [B, budget].
            branches: of the rows' texts, which take the place of nodes that count less; none for
                trees of the predictor alone. Not for sequences.
        """
        if predictor.num_levels is not None:
            depth = min(depth, predictor.num_levels)
        has_text = any(branch.tokens for branch in branches)
        if self.kind == "dynamic":
            temperature = max(*_temperatures(warp), self.score_temperature)
            proposal, scores = _likeliest_nodes(predictor, depth, self.budget, temperature)
            return merged(proposal, scores.exp().tolist(), branches) if has_text else proposal
        if self.kind == "static":
            parents = best_shape(self.rates, depth, self.budget)
            if not has_text:
                return grow_static(predictor, parents, warp, uniforms)
            return self._static_with_text(predictor, parents, warp, uniforms, branches)
        depth = min(depth, self.budget)
        num_sequences = self.budget // depth
        if self.replacement and not _is_greedy(warp):
            return grow_sequences(predictor, num_sequences, depth, warp, uniforms)
        # Sequences of likeliest tokens would all be the same, so they begin with different ones.
        parents = sequences_shape(num_sequences, depth)
        return grow_static(predictor, parents, warp, uniforms)

    def _static_with_text(
        self,
        predictor: Predictor,
        parents: Parents,
        warp: Any,
        uniforms: Tensor,
        branches: Sequence[TextBranch],
    ) -> TreeProposal:
        values = shape_values(self.rates, parents)
        if _is_greedy(warp):
            proposal = grow_static(predictor, parents, warp, uniforms)
            return merged(proposal, [values] * len(uniforms), branches)
        taken = first_tokens(branches, uniforms.device)
        return beside(grow_static(predictor, parents, warp, uniforms, taken), values, branches)


def grow_dynamic(
    predictor: Predictor, depth: int, budget: int, temperature: float = 1.0
) -> TreeProposal:
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858): expand the nodes that are likeliest to be reached,
    and keep the likeliest of all that were found.

    A node's score is the product of the drafter's probabilities on its path, at a temperature, so a
    parent scores no less than its children. The trees follow from the texts alone.
    """
    proposal, _ = _likeliest_nodes(predictor, depth, budget, temperature)
    return proposal


def _likeliest_nodes(
    predictor: Predictor, depth: int, budget: int, temperature: float
) -> tuple[TreeProposal, Tensor]:
    """Grow dynamic trees -> the trees, and the logarithms of their nodes' scores [B, N]."""
    logits = predictor.root()
    width = min(predictor.width or budget, budget, logits.shape[-1])
    num_rows = len(logits)
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    parents: list[Tensor] = []
    # Scores and numbers of the nodes that the logits follow: at first the root's.
    above = logits.new_zeros(num_rows, 1, dtype=torch.float32)
    numbers = torch.zeros(num_rows, 1, dtype=torch.long, device=logits.device)
    num_found = 0
    for level in range(depth):
        confidence = (logits.float() / temperature).log_softmax(-1)
        children = confidence.topk(width, dim=-1)
        num_above = above.shape[1]
        level_scores = (above.unsqueeze(2) + children.values).flatten(1)
        level_tokens = children.indices.expand(-1, num_above, -1).flatten(1)
        scores.append(level_scores)
        tokens.append(level_tokens)
        parents.append(numbers.repeat_interleave(width, dim=1))
        if level + 1 == depth:
            break
        best = level_scores.topk(width, dim=1).indices
        above = level_scores.gather(1, best)
        numbers = best + 1 + num_found
        num_found += level_scores.shape[1]
        logits = predictor.expand(level_tokens.gather(1, best), best // width)
    # Stable: a parent comes before a child that scores the same.
    order = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :budget].sort(dim=1).values
    chosen_parents = torch.cat(parents, dim=1).gather(1, chosen)
    # Numbers among all that were found become numbers among those that are chosen.
    places = torch.searchsorted(chosen + 1, chosen_parents) + 1
    renumbered = torch.where(chosen_parents == 0, 0, places)
    shape = TreeShape([tuple(row) for row in renumbered.tolist()])
    proposal = TreeProposal(torch.cat(tokens, dim=1).gather(1, chosen), shape)
    return proposal, torch.cat(scores, dim=1).gather(1, chosen)


def grow_static(
    predictor: Predictor,
    parents: Parents,
    warp: Any,
    uniforms: Tensor,
    taken: tuple[Tensor, Tensor] | None = None,
) -> TreeProposal:
    """Draw trees of one shape, the children of each node without replacement; with a greedy warp the
    likeliest ones.

    Args:
        taken: a token [B] that no child of the root is, and in which rows [B] there is one.
    """
    num_rows = len(uniforms)
    num_nodes = len(parents)
    children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.long, device=uniforms.device)
    logits = predictor.root()
    probabilities = None
    if not _is_greedy(warp):
        probabilities = logits.new_zeros(
            num_rows, num_nodes + 1, logits.shape[-1], dtype=torch.float32
        )
    level = [0]
    while level:
        for place, node in enumerate(level):
            if probabilities is None:
                _take_likeliest(tokens, children[node], logits[:, place])
            else:
                probabilities[:, node] = warp(logits[:, place])
                drawn_from = probabilities[:, node]
                if node == 0 and taken is not None:
                    drawn_from = _without(drawn_from, *taken)
                _draw_children(tokens, children[node], drawn_from, uniforms)
        # Nodes of the next level that have children.
        following: list[int] = []
        for node in level:
            following += [child for child in children[node] if children[child]]
        if following:
            logits = _expand(predictor, tokens, parents, level, following)
        level = following
    return TreeProposal(tokens, TreeShape([parents] * num_rows), probabilities)


def _without(probabilities: Tensor, tokens: Tensor, are_there: Tensor) -> Tensor:
    """Take a token [B] out of probabilities [B, V], in the rows where there is one."""
    left = probabilities.scatter(1, tokens.unsqueeze(1), 0.0)
    return torch.where(are_there.unsqueeze(1), left, probabilities)


def _take_likeliest(tokens: Tensor, siblings: Sequence[int], logits: Tensor) -> None:
    """Set the tokens [B, N] of siblings to the likeliest ones by logits [B, V]."""
    num_known = min(len(siblings), logits.shape[-1])
    columns = [node - 1 for node in siblings[:num_known]]
    tokens[:, columns] = logits.topk(num_known, dim=-1).indices


def _draw_children(
    tokens: Tensor, siblings: Sequence[int], probabilities: Tensor, uniforms: Tensor
) -> None:
    """Set the tokens [B, N] of siblings to draws from probabilities [B, V] without replacement."""
    columns = [node - 1 for node in siblings]
    for number, column in enumerate(columns):
        drawn_before = tokens[:, columns[:number]]
        tokens[:, column] = draw_child(probabilities, drawn_before, uniforms[:, column])


def _expand(
    predictor: Predictor,
    tokens: Tensor,
    parents: Parents,
    level: Sequence[int],
    following: Sequence[int],
) -> Tensor:
    """Return logits [B, n, V] after n nodes whose parents are in a level."""
    above = [level.index(parents[node - 1]) for node in following]
    places = torch.tensor(above, device=tokens.device)
    columns = [node - 1 for node in following]
    logits = predictor.expand(tokens[:, columns], places.expand(len(tokens), -1))
    return logits.expand(-1, len(following), -1)


def grow_sequences(
    predictor: Predictor, num_sequences: int, depth: int, warp: Any, uniforms: Tensor
) -> TreeProposal:
    """SpecInfer (Miao et al. 2023, arXiv:2305.09781): draw sequences independently of each other,
    and merge their equal beginnings.

    Sequences that draw the same token after a node share one child. In the order in which they were
    first drawn, the children of a node are distributed as if drawn without replacement, however
    many there are: a token that is drawn again says nothing about the next new one. So the rules
    for draws without replacement are lossless.
    """
    num_rows = len(uniforms)
    numbers = uniforms[:, : depth * num_sequences].reshape(num_rows, depth, num_sequences)
    itself = torch.arange(num_sequences, device=uniforms.device).expand(num_rows, -1)
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    for level in range(depth):
        if level == 0:
            logits = predictor.root()
        else:
            parents = torch.zeros_like(itself) if level == 1 else itself
            logits = predictor.expand(tokens[-1], parents)
        probabilities = warp(logits).expand(-1, num_sequences, -1)
        distributions.append(probabilities)
        tokens.append(existing_index(probabilities, numbers[:, level]))
    return _merge(torch.stack(tokens, dim=2), torch.stack(distributions, dim=2))


def _merge(tokens: Tensor, distributions: Tensor) -> TreeProposal:
    """Merge sequences [B, n, K], whose tokens were drawn from distributions [B, n, K, V]."""
    tries = [_Trie.of(sequences) for sequences in tokens.tolist()]
    num_nodes = max(len(trie.tokens) for trie in tries)
    for trie in tries:
        trie.fill(num_nodes)
    # Behind the last place there are zeros, for leaves.
    places = functional.pad(distributions.flatten(1, 2), (0, 0, 0, 1))
    rows = torch.arange(len(tries), device=tokens.device).unsqueeze(1)
    following = torch.tensor([trie.following for trie in tries], device=tokens.device)
    return TreeProposal(
        torch.tensor([trie.tokens for trie in tries], device=tokens.device),
        TreeShape([tuple(trie.parents) for trie in tries]),
        places[rows, following],
    )


@dataclass
class _Trie:
    """Sequences of one row, merged where they begin alike.

    Attributes:
        tokens, parents: of the nodes, in the order in which they were drawn.
        following: of the root and of each node: the place, among all tokens of all sequences, that
            was drawn from the distribution after it; -1 for a leaf.
    """

    tokens: list[int]
    parents: list[int]
    following: list[int]

    @classmethod
    def of(cls, sequences: list[list[int]]) -> _Trie:
        trie = cls([], [], [0])
        numbers: dict[tuple[int, int], int] = {}
        place = 0
        for sequence in sequences:
            node = 0
            for level, token in enumerate(sequence, start=1):
                place += 1
                if (node, token) not in numbers:
                    numbers[node, token] = trie.add(node, token)
                    trie.following.append(place if level < len(sequence) else -1)
                node = numbers[node, token]
        return trie

    def add(self, parent: int, token: int) -> int:
        """Add a node, and return its number."""
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.tokens)

    def fill(self, num_nodes: int) -> None:
        """Repeat the first token: no rule tests a token again that was drawn without replacement."""
        while len(self.tokens) < num_nodes:
            self.add(0, self.tokens[0])
            self.following.append(-1)


def sequences_shape(num_sequences: int, depth: int) -> Parents:
    """Return the tree of sequences that differ from their first token on."""
    parents: list[int] = []
    for _ in range(num_sequences):
        first = len(parents) + 1
        parents += [0, *range(first, first + depth - 1)]
    return tuple(parents)


def _temperatures(warp: Any) -> list[float]:
    """Return the temperatures of a batch's rows, or the one that they share."""
    current = getattr(warp, "current", warp)
    rows = getattr(current, "rows", [current])
    return [row.temperature for row in rows]


def _is_greedy(warp: Any) -> bool:
    return max(_temperatures(warp)) == 0


@lru_cache(maxsize=64)
def best_shape(rates: Sequence[float], depth: int, budget: int) -> Parents:
    """Return the tree of `budget` nodes or fewer with the most accepted tokens.

    The i-th child of a node is accepted with probability rates[i], wherever the node is (Sequoia,
    Chen et al. 2024, arXiv:2402.12374). A node then counts by the product on its path, no more than
    its parent or an elder sibling, so the nodes that count most are the tree of Sequoia's dynamic
    programme.
    """
    # Falling rates: a later child is never accepted more often than an earlier one.
    falling = list(itertools.accumulate(rates, min))
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, float]] = []

    def offer(above: float, level: int, parent: int, rank: int) -> None:
        if rank < len(falling) and level <= depth and falling[rank] > 0:
            heapq.heappush(waiting, (-above * falling[rank], level, parent, rank, above))

    offer(1.0, 1, 0, 0)
    while waiting and len(parents) < budget:
        value, level, parent, rank, above = heapq.heappop(waiting)
        parents.append(parent)
        offer(above, level, parent, rank + 1)
        offer(-value, level + 1, len(parents), 0)
    return tuple(parents)


def shape_values(rates: Sequence[float], parents: Parents) -> list[float]:
    """Return the chance that each node is reached and accepted, in the tree that `best_shape` gives."""
    falling = list(itertools.accumulate(rates, min))
    values = [1.0]
    num_children = [0] * (len(parents) + 1)
    for parent in parents:
        values.append(values[parent] * falling[num_children[parent]])
        num_children[parent] += 1
    return values[1:]
