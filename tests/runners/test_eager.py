from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from architectures import ARCHITECTURES, VOCABULARY, random_model
from harness.runners.eager import EagerRunner

PROMPTS = [[5, 9, 23, 4, 17, 31, 8], [11, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


def logits_without_cache(model: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    """[len(sequence), V], the row alone, without padding and without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).norm() / expected.norm() < 1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("batch", [PROMPTS[:1], PROMPTS], ids=["one row", "ragged rows"])
def test_rollback_is_exact(name: str, batch: list[list[int]]) -> None:
    model = random_model(name)
    runner = EagerRunner(model)
    generator = torch.Generator().manual_seed(1)
    sequences = [list(prompt) for prompt in batch]
    logits = runner.start(batch)
    for row, sequence in enumerate(sequences):
        assert close(logits[row], logits_without_cache(model, sequence)[-1])
    for _ in range(6):
        fed = torch.randint(3, VOCABULARY, (len(batch), 5), generator=generator)
        # Two extensions before one keep, as a drafter does it.
        logits = torch.cat([runner.extend(fed[:, :2]), runner.extend(fed[:, 2:])], dim=1)
        counts = torch.randint(0, 6, (len(batch),), generator=generator).tolist()
        for row, sequence in enumerate(sequences):
            expected = logits_without_cache(model, sequence + fed[row].tolist())[-5:]
            assert close(logits[row], expected), f"row {row} after {len(sequence)} tokens"
            sequence += fed[row, : counts[row]].tolist()
        runner.keep(counts)


def test_selected_rows_go_on_unchanged() -> None:
    model = random_model("llama")
    runner = EagerRunner(model)
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7, 8], [9, 10], [11, 12]]))
    runner.keep([2, 1, 0])
    runner.select([1, 0])
    logits = runner.extend(torch.tensor([[20], [21]]))
    assert close(logits[0, 0], logits_without_cache(model, [*PROMPTS[1], 9, 20])[-1])
    assert close(logits[1, 0], logits_without_cache(model, [*PROMPTS[0], 7, 8, 21])[-1])


def test_a_runner_starts_anew() -> None:
    model = random_model("gpt2")
    runner = EagerRunner(model)
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7], [8], [9]]))
    assert close(runner.start(PROMPTS[1:2])[0], logits_without_cache(model, PROMPTS[1])[-1])


def test_equal_prompts_read_once_go_on_apart() -> None:
    model = random_model("llama")
    runner = EagerRunner(model)
    logits = runner.start([PROMPTS[0]] * 3)
    assert logits.shape == (3, VOCABULARY)
    assert all(close(row, logits_without_cache(model, PROMPTS[0])[-1]) for row in logits)
    fed = [[7, 8], [9, 10], [11, 12]]
    runner.extend(torch.tensor(fed))
    runner.keep([2, 1, 0])
    logits = runner.extend(torch.tensor([[20], [21], [22]]))
    for row, (count, last) in enumerate(zip([2, 1, 0], [20, 21, 22], strict=True)):
        expected = logits_without_cache(model, [*PROMPTS[0], *fed[row][:count], last])[-1]
        assert close(logits[row, 0], expected)


def test_logits_are_cut_to_the_vocabulary() -> None:
    assert EagerRunner(random_model("opt"), vocabulary_size=90).start(PROMPTS).shape == (3, 90)


def test_what_was_not_extended_cannot_be_kept() -> None:
    runner = EagerRunner(random_model("llama"))
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7], [8], [9]]))
    with pytest.raises(ValueError, match="cannot keep"):
        runner.keep([1, 2, 1])
    with pytest.raises(ValueError, match="before selecting"):
        runner.select([0])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        EagerRunner(random_model("llama")).start([[1], []])
