"""The rows of `distill`: those of `latency` before the training and after it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.commands.latency.rows import LatencyRow
from harness.results.row import figure, setting
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText


@dataclass(frozen=True, kw_only=True)
class DistillRow(LatencyRow):
    """`distill.csv`: one row per arm before the training, and one per arm after it."""

    kind = "distill"
    recognised_by = ("stage", "num_learned_tokens", "loss", "epochs")

    stage: MaybeText = figure("`before` or `after` the training")
    num_texts: MaybeInt = figure("answers learned")
    num_learned_tokens: MaybeInt = figure("their tokens, in all epochs", "tokens")
    num_steps: MaybeInt = figure("batches")
    loss: MaybeFloat = figure("cross-entropy over the last tenth of the steps")
    training_s: MaybeFloat = figure("time of the training, since it was last begun", "s")
    output: MaybeText = setting("directory of the trained draft", "directory")
    temperatures: list[float] | None = setting("temperatures of the answers", "temperatures")
    answer_tokens: MaybeInt = setting("most tokens of an answer", "answer_tokens", "tokens")
    epochs: MaybeInt = setting("how often each answer is learned", "epochs")
    texts_per_step: MaybeInt = setting("answers of one batch", "texts_per_step")
    learning_rate: MaybeFloat = setting("highest learning rate", "learning_rate")
    chain: MaybeInt = setting(
        "tokens ahead that an EAGLE-3 head is trained to draft", "chain", "tokens"
    )
