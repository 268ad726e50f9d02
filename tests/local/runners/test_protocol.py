"""The duties of every runner: its logits and hidden states are transformers' own, each row alone, without a cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import (
    ARCHITECTURES,
    NOT_STATIC,
    PROMPTS,
    RECURRENT,
    VOCABULARY,
    close,
    random_model,
)
from harness.local.decoding.protocols import Runner
from harness.local.models.checkpoints import is_recurrent
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

# The embeddings, the input of the last layer, and the output after the final norm; in no particular order.
LAYERS = (2, 0, 3)
SHARED = [[5, 9, 23, *prompt] for prompt in PROMPTS]
BATCHES = {
    "ragged": SHARED,
    "equal": [SHARED[0]] * 3,
    "one begins the others": [SHARED[0][:4], SHARED[0], SHARED[0][:8]],
    "one": PROMPTS[:1],
    "nothing shared": PROMPTS,
}


RUNNERS: dict[str, Callable[[PreTrainedModel], Runner]] = {
    "static": lambda model: StaticRunner(model, hidden_layers=LAYERS),
    "snapshot": lambda model: SnapshotRunner(model, hidden_layers=LAYERS),
}


def expected(model: PreTrainedModel, sequence: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states [len(sequence), L, D], and logits [len(sequence), V]."""
    output = model(input_ids=torch.tensor([sequence]), use_cache=False, output_hidden_states=True)
    states = torch.stack([output.hidden_states[layer][0] for layer in LAYERS], dim=1)
    return states, output.logits[0]


def assert_transformers_own(runner: Runner, model: PreTrainedModel, batch: list[list[int]]) -> None:
    sequences = [list(prompt) for prompt in batch]
    # A state collects more rounding than keys and values do.
    tolerance = 1e-4 if is_recurrent(model.config) else 1e-5

    def check(row: int, hidden: Tensor, logits: Tensor, sequence: list[int]) -> None:
        states, wanted = expected(model, sequence)
        assert close(hidden, states[-len(hidden) :], tolerance), (
            f"row {row} after {len(sequence)} tokens"
        )
        assert close(logits, wanted[-len(logits) :], tolerance), f"row {row} of {len(sequence)}"

    step = runner.start(batch)
    assert step.hidden.shape[:3] == (len(batch), max(map(len, batch)), len(LAYERS))
    for row, sequence in enumerate(sequences):
        check(row, step.hidden[row, -len(sequence) :], step.logits[row : row + 1], sequence)
    generator = torch.Generator().manual_seed(1)
    # The last one is two passes of which the second goes on, as a drafter makes them.
    rounds = [((4,), [2, 0, 4]), ((1,), [1, 1, 1]), ((3,), [0, 3, 1]), ((1, 4), [4, 5, 0])]
    for widths, counts in rounds:
        fed = torch.randint(3, VOCABULARY, (len(batch), sum(widths)), generator=generator)
        starts = list(map(len, sequences))
        first, *others = fed.split(widths, dim=1)
        steps = [runner.extend(first, starts)]
        for tokens in others:
            behind = [start + first.shape[1] for start in starts]
            steps.append(runner.extend(tokens, behind, goes_on=True))
        hidden = torch.cat([step.hidden for step in steps], dim=1)
        logits = torch.cat([step.logits for step in steps], dim=1)
        for row, sequence in enumerate(sequences):
            new = fed[row].tolist()
            check(row, hidden[row], logits[row], sequence + new)
            sequence += new[: counts[row]]
    if len(batch) > 1:
        # The row between two others rests.
        resting: list[int | None] = [len(sequences[0]), None, len(sequences[2])]
        step = runner.extend(torch.tensor([[7], [9], [8]]), resting)
        check(0, step.hidden[0], step.logits[0], [*sequences[0], 7])
        check(2, step.hidden[2], step.logits[2], [*sequences[2], 8])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in RUNNERS for name in ARCHITECTURES if name not in NOT_STATIC]
    + [("snapshot", name) for name in (*NOT_STATIC, *RECURRENT)],
)
def test_they_are_transformers_own_on_ragged_rows_and_after_rollback(kind: str, name: str) -> None:
    model = random_model(name)
    assert_transformers_own(RUNNERS[kind](model), model, SHARED)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", RUNNERS)
def test_they_cover_the_whole_prompt(kind: str, batch: str) -> None:
    model = random_model("llama")
    assert_transformers_own(RUNNERS[kind](model), model, BATCHES[batch])


KINDS = [SnapshotRunner, StaticRunner]
Kind = type[SnapshotRunner] | type[StaticRunner]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_cut_to_the_vocabulary(kind: Kind) -> None:
    runner = kind(random_model("opt"), vocabulary_size=90)
    assert runner.start(PROMPTS).logits.shape == (3, 90)
    step = runner.extend(torch.ones(3, 2, dtype=torch.long), list(map(len, PROMPTS)))
    assert step.logits.shape == (3, 2, 90)


def test_a_row_goes_on_where_it_was_read() -> None:
    runner = SnapshotRunner(random_model("llama"))
    runner.start(PROMPTS)
    tokens, lengths = torch.tensor([[7], [8], [9]]), list(map(len, PROMPTS))
    runner.extend(tokens, lengths)
    ends = [length + more for length, more in zip(lengths, [1, 2, 1], strict=True)]
    with pytest.raises(ValueError, match=r"cannot keep \[1, 2, 1\] of 1 tokens"):
        runner.extend(tokens, ends)
