"""The training loop: its order, and that a run that was cut short comes to the same weights."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch

from architectures import VOCABULARY, random_model
from harness.commands.distill.loop import Course, TrainingText, save_whole, train

GENERATOR = torch.Generator().manual_seed(2)
TEXTS = [
    TrainingText(torch.randint(0, VOCABULARY, (6 + number % 5,), generator=GENERATOR).tolist(), 3)
    for number in range(10)
]
COURSE = Course(epochs=3, batch_size=4, learning_rate=1e-3, chain=2, seed=7)


def test_every_epoch_has_every_text_in_an_order_of_its_own() -> None:
    assert COURSE.num_steps(len(TEXTS)) == 9
    epochs = [
        [COURSE.number(len(TEXTS), step) for step in range(first, first + 3)] for first in (0, 3, 6)
    ]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    learned = [text for number in range(3) for text in COURSE.batch(TEXTS, number)]
    assert sorted(map(id, learned)) == sorted(map(id, TEXTS))
    assert learned != TEXTS


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [COURSE.rate(step, 200) for step in range(200)]
    peak = rates.index(max(rates))
    assert peak < 10
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)


class Killed(Exception):
    pass


@pytest.mark.parametrize("last", [1, 2, 6, None])
def test_training_that_was_cut_short_goes_on_as_it_would_have(
    last: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_model("llama")

    def trained(name: str, stop: int | None) -> tuple[torch.nn.Module, list[float]]:
        module, losses = random_model("llama", seed=5), []

        def note(loss: float) -> None:
            losses.append(loss)
            if len(losses) == stop:
                raise Killed

        train(
            module,
            target,
            TEXTS,
            COURSE,
            tmp_path / name,
            vocabulary_size=VOCABULARY,
            save_every=2,
            advance=note,
        )
        return module, losses

    whole, losses = trained("whole", None)
    assert losses[-1] < losses[0]
    if last is not None:
        with pytest.raises(Killed):
            trained("cut", last)
        assert (tmp_path / "cut").exists() == (last > 2)
    # A target that is asked again says what it said.
    monkeypatch.setattr("harness.commands.distill.loop.KEPT_BYTES", 0)
    again, repeated = trained("cut", None)
    assert repeated == losses
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_state_that_the_disk_does_not_hold_leaves_the_old_one_and_nothing_else(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state.pt"
    save_whole({"weights": torch.zeros(10)}, state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_whole({"weights": torch.zeros(100_000)}, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert len(torch.load(state)["weights"]) == 10
    assert list(tmp_path.iterdir()) == [state]
