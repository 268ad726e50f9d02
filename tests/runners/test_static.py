from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, VOCABULARY, random_model
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Request, autoregressive, speculative
from harness.decoding.randomness import uniforms
from harness.decoding.warp import Warp
from harness.runners.eager import EagerRunner, RollbackError
from harness.runners.shared_prefix import SharedPrefixRunner
from harness.runners.slots import UnsupportedModelError
from harness.runners.static import BUCKET, StaticRunner

PROMPTS = [[5, 9, 23, 4, 17, 31, 8], [11, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]
REFUSED = {"bloom": "takes no positions", "falcon_alibi": "ALiBi"}
SERVED = [name for name in ARCHITECTURES if name not in REFUSED]


def logits_without_cache(model: PreTrainedModel, sequence: list[int]) -> Tensor:
    """[len(sequence), V], the row alone, without padding and without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() / expected.norm() < 1e-5)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("batch", [PROMPTS[:1], PROMPTS], ids=["one row", "ragged rows"])
def test_rollback_is_exact(name: str, batch: list[list[int]]) -> None:
    model = random_model(name)
    runner = StaticRunner(model)
    generator = torch.Generator().manual_seed(1)
    sequences = [list(prompt) for prompt in batch]
    logits = runner.start(batch)
    for row, sequence in enumerate(sequences):
        assert close(logits[row], logits_without_cache(model, sequence)[-1])
    for _ in range(6):
        fed = torch.randint(3, VOCABULARY, (len(batch), 5), generator=generator)
        logits = torch.cat([runner.extend(fed[:, :2]), runner.extend(fed[:, 2:])], dim=1)
        counts = torch.randint(0, 6, (len(batch),), generator=generator).tolist()
        for row, sequence in enumerate(sequences):
            expected = logits_without_cache(model, sequence + fed[row].tolist())[-5:]
            assert close(logits[row], expected), f"row {row} after {len(sequence)} tokens"
            sequence += fed[row, : counts[row]].tolist()
        runner.keep(counts)


@pytest.mark.parametrize("name", SERVED)
def test_it_agrees_with_the_eager_runner(name: str) -> None:
    StaticRunner(random_model(name)).check()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        StaticRunner(random_model(name))


def test_a_model_with_another_state_is_refused() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises((UnsupportedModelError, RollbackError)):
        StaticRunner(MambaForCausalLM(config).eval()).start(PROMPTS)


def test_a_model_on_several_devices_is_refused() -> None:
    model = random_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(UnsupportedModelError, match="lies on 0, 1"):
        StaticRunner(model)


def test_a_model_whose_logits_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.runners.slots._windows", lambda model: {"": 2})
    with pytest.raises(UnsupportedModelError, match="differ from the eager ones"):
        StaticRunner(random_model("llama")).check()


def test_masks_by_type_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen 3 with some layers that see a window only."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    qwen3 = {**ARCHITECTURES["qwen2"], "model_type": "qwen3", "head_dim": 8, "layer_types": types}
    monkeypatch.setitem(ARCHITECTURES, "qwen3", {**qwen3, "use_sliding_window": True, "sliding_window": 4})
    StaticRunner(random_model("qwen3")).check()


def test_selected_rows_go_on_unchanged() -> None:
    model = random_model("llama")
    runner = StaticRunner(model)
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7, 8], [9, 10], [11, 12]]))
    runner.keep([2, 1, 0])
    runner.select([1, 0])
    logits = runner.extend(torch.tensor([[20], [21]]))
    assert close(logits[0, 0], logits_without_cache(model, [*PROMPTS[1], 9, 20])[-1])
    assert close(logits[1, 0], logits_without_cache(model, [*PROMPTS[0], 7, 8, 21])[-1])


def test_slots_grow_when_they_are_full() -> None:
    model = random_model("llama")
    runner, eager = StaticRunner(model), EagerRunner(model)
    generator = torch.Generator().manual_seed(2)
    for each in (runner, eager):
        each.start(PROMPTS)
    for _ in range(3):
        fed = torch.randint(3, VOCABULARY, (3, BUCKET // 2), generator=generator)
        assert close(runner.extend(fed), eager.extend(fed))
        for each in (runner, eager):
            each.keep([60, 64, 50])


def test_equal_prompts_read_once_go_on_apart() -> None:
    model = random_model("llama")
    runner = StaticRunner(model)
    assert runner.start([PROMPTS[0]] * 3).shape == (3, VOCABULARY)
    fed = [[7, 8], [9, 10], [11, 12]]
    runner.extend(torch.tensor(fed))
    runner.keep([2, 1, 0])
    logits = runner.extend(torch.tensor([[20], [21], [22]]))
    for row, (count, last) in enumerate(zip([2, 1, 0], [20, 21, 22], strict=True)):
        expected = logits_without_cache(model, [*PROMPTS[0], *fed[row][:count], last])[-1]
        assert close(logits[row, 0], expected)


def test_a_shared_prefix_is_read_once() -> None:
    model = random_model("gemma2")
    prompts = [[5, 9, 23, 4, 17, 3], [5, 9, 23, 4, 17, 6, 7], [5, 9, 23, 4, 17]]
    shared = SharedPrefixRunner(StaticRunner(model))
    assert close(shared.start(prompts), EagerRunner(model).start(prompts))


@pytest.mark.parametrize("name", SERVED)
def test_both_decoders_write_what_they_write_eagerly(name: str) -> None:
    model, draft = random_model(name), random_model(name, seed=1)
    with torch.no_grad():  # a draft that agrees now and then: the target, disturbed
        for parameter, original in zip(draft.parameters(), model.parameters(), strict=True):
            parameter.copy_(original + 0.05 * parameter)
    what = Request(PROMPTS, uniforms(0, range(3), 25), Warp(1.0), 24, frozenset({50}))
    written = []
    for kind in (EagerRunner, StaticRunner):
        drafter = ModelDrafter(kind(draft), what.warp)
        for records in (autoregressive(kind(model), what), speculative(kind(model), drafter, what, 4)):
            written.append([(record.rows, record.tokens, record.num_accepted) for record in records])
    assert written[:2] == written[2:]


def test_logits_are_cut_to_the_vocabulary() -> None:
    runner = StaticRunner(random_model("opt"), vocabulary_size=90)
    assert runner.start(PROMPTS).shape == (3, 90)
    assert runner.extend(torch.ones(3, 2, dtype=torch.long)).shape == (3, 2, 90)


def test_what_was_not_extended_cannot_be_kept() -> None:
    runner = StaticRunner(random_model("llama"))
    runner.start(PROMPTS)
    runner.extend(torch.tensor([[7], [8], [9]]))
    with pytest.raises(ValueError, match="cannot keep"):
        runner.keep([1, 2, 1])
    with pytest.raises(ValueError, match="before selecting"):
        runner.select([0])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        StaticRunner(random_model("llama")).start([[1], []])
