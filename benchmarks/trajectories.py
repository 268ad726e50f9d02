"""Does one pass over a conversation say what decoding turn by turn does, and do its intervals hold?

    python -m recipes.tiny_trajectories DIRECTORY
    python benchmarks/trajectories.py DIRECTORY [--decoded 20] [decoding=greedy]

Reads the conversations once, reads each answer alone after its own prompt, and decodes the turns of the first
`--decoded` conversations at K = 4, one at a time, counting the passes of both models. Then sets of conversations are
drawn from all, with replacement: how often do intervals of such a set hold the figure of all?
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from transformers import PreTrainedModel

from harness.commands.acceptance.parts import parts_of
from harness.engines.door.reading import ReadText, Transcript
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.timing import timed_answer
from harness.local.engine.engine import LocalEngine
from harness.local.engine.pair import plan_pair
from harness.local.engine.reading import PairReader
from harness.measuring.prompts.encoding import transcribe
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.prompts.transcripts import Reading
from harness.results.statistics.ratios import log_ratio

K = 4
SETS = 2000


class Passes:
    """Counts forward passes of models."""

    def __init__(self) -> None:
        self.count = 0
        torch.nn.modules.module.register_module_forward_pre_hook(self._called)

    def _called(self, module: torch.nn.Module, inputs: Any) -> None:
        self.count += (
            isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None
        )

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("settings", nargs="*", help="of `acceptance`, such as decoding=greedy")
    parser.add_argument("--decoded", type=int, default=20)
    options = parser.parse_intermixed_args()
    directory = options.directory.resolve()
    settings = common.settings(
        f"model={directory}/target",
        f"draft={directory}/draft",
        f"prompts={directory}/trajectories.jsonl",
        f"decoding.num_draft_tokens={K}",
        "placement=cpu",
        *options.settings,
    )
    pair = common.load(settings)
    prompts = load_prompts(settings.prompts).prompts
    planned = plan_pair(settings.model, settings.draft, settings.placement, settings.dtype)
    readings = [one for prompt in prompts for one in transcribe(planned, settings, prompt)]
    passes = Passes()
    reader = PairReader(pair, settings.decoding, K)
    together = [*reader.read(one.transcript for one in readings)]
    num_together = passes.since()
    alone = []
    for one in readings:
        ids = one.transcript.token_ids
        answers = [
            Transcript.of(ids[: a.start], ids[a.start : a.stop]) for a in one.transcript.answers
        ]
        alone.append([text for [text] in reader.read(answers)])
    reader.close()
    iterations = of_conversations(together)
    apart = of_conversations(alone)
    tokens = np.array([sum(text.cut.num_tokens for text in texts) for texts in together], float)
    num_turns = sum(map(len, together))
    print(f"{len(readings)} conversations, {num_turns} turns, {tokens.sum():.0f} tokens, K={K}")
    print(
        f"one pass: {tokens.sum() / iterations.sum():.4f} tokens per iteration in {num_together} forward passes;"
        f" each answer alone {tokens.sum() / apart.sum():.4f},"
        f" largest difference of a conversation {np.abs(iterations / apart - 1).max():.1e}",
        flush=True,
    )
    coverage("all", tokens, iterations, sizes=(10, 20, 50, 100))
    turns = [turn.number or 1 for one in readings for turn in one.turns]
    conversations = [place for place, texts in enumerate(together) for _ in texts]
    for part in parts_of(turns, [text for texts in together for text in texts], conversations):
        # A conversation without the part adds nothing to either.
        places = range(len(readings))
        own_tokens = np.array([part.num_tokens.get(place, 0) for place in places], float)
        nothing = np.zeros(K)
        own_iterations = np.array([part.iterations.get(place, nothing)[K - 1] for place in places])
        coverage(f"turn {part.name}", own_tokens, own_iterations, sizes=(20, 50, 100))
    decoded(
        pair, settings, readings[: options.decoded], together, passes, num_together / len(readings)
    )


def of_conversations(texts: list[list[ReadText]]) -> Any:
    """Expected iterations of each conversation."""
    return np.array([sum(text.cut.iterations[K - 1] for text in own) for own in texts])


def decoded(
    pair: Any,
    settings: Any,
    readings: list[Reading],
    together: list[list[ReadText]],
    passes: Passes,
    per_one: float,
) -> None:
    """Decode each turn from its own prompt, as many tokens as it has, and read what was decoded in one pass."""
    num_tokens = num_iterations = 0
    texts = []
    same_texts = 0
    for number, reading in enumerate(readings):
        for place, answer in enumerate(reading.transcript.answers):
            decoding = dataclasses.replace(
                settings.decoding, max_new_tokens=len(answer), ignore_eos=True
            )
            prompt = list(reading.transcript.token_ids[: answer.start])
            preparation = Preparation(
                decoding=decoding, runner="eager", batch_size=1, longest_prompt=len(prompt)
            )
            engine = LocalEngine(pair, preparation)
            question = Question([prompt], decoding, 1, [1000 * number + place])
            [request] = timed_answer(engine, engine.arms[1], question).requests
            engine.close()
            num_tokens += len(request.token_ids) - 1
            num_iterations += len(request.outcomes)
            texts.append(Transcript.of(prompt, request.token_ids))
            recorded = reading.transcript.token_ids[answer.start : answer.stop]
            same_texts += [*request.token_ids] == [*recorded]
    num_passes = passes.since()
    pass_share = num_passes / (per_one * len(readings))
    print(
        f"turn by turn, {len(readings)} conversations: {num_tokens / num_iterations:.4f} tokens per iteration in"
        f" {num_passes} forward passes, {pass_share:.0f} times those of one pass for each; {same_texts} of"
        f" {len(texts)} turns have the tokens of the file"
    )
    # What the target draws now differs from what the file holds, unless it is greedy: so both are read.
    reader = PairReader(pair, settings.decoding, K)
    said("the texts that were decoded", num_iterations, [*reader.read(texts)])
    reader.close()
    said("the texts of the file", num_iterations, together[: len(readings)])


def said(what: str, num_iterations: int, read: list[list[ReadText]]) -> None:
    """Print what one pass expects of texts, beside the iterations that decoding took."""
    tokens = sum(text.cut.num_tokens for texts in read for text in texts)
    expected = of_conversations(read).sum()
    error = np.sqrt(sum(text.cut.variance[K - 1] for texts in read for text in texts)) / expected
    print(
        f"one pass over {what}: {tokens / expected:.4f} tokens per iteration; decoding took"
        f" {num_iterations / expected - 1:+.2%} iterations (standard error by acceptance alone {error:.2%})",
        flush=True,
    )


def coverage(what: str, tokens: Any, iterations: Any, sizes: tuple[int, ...]) -> None:
    """How often intervals of sets of conversations hold the figure of all."""
    truth = tokens.sum() / iterations.sum()
    rng = np.random.default_rng(0)
    parts = []
    for size in sizes:
        num_intervals = held = 0
        for _ in range(SETS):
            drawn = rng.integers(0, len(tokens), size)
            drawn = drawn[tokens[drawn] > 0]
            found = log_ratio([tokens[drawn]], [iterations[drawn]], "conversation", skewed=True)
            if found.has_bounds:
                num_intervals += 1
                held += not found.excludes(truth)
        share = f"{held / num_intervals:.1%}" if num_intervals else "none"
        parts.append(f"{size}: {share} of {num_intervals}")
    print(f"{what} {truth:.3f}, held by intervals of sets of {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
