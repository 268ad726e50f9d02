"""`acceptance`: one pass of the target over texts, one of the draft for each depth at most, and what follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.commands.acceptance.record import EXIT_CODES, RECORD, AcceptanceSettings
from harness.commands.acceptance.rows import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.commands.acceptance.tables import acceptance_document, health_in_words
from harness.commands.latency.rows import LatencyRow
from harness.commands.latency.tables.costs import costs_in_steps, proposed_per_iteration
from harness.commands.optional_plots import optional_plots
from harness.commands.plan.measure import iteration_bytes
from harness.commands.read_runs import Run, newest_of_pair
from harness.config.errors import SettingError, VerdictError
from harness.decoding.protocols import Drafter
from harness.drafting.along import chosen, probabilities_along, read_along
from harness.engines.local.batches import in_batches
from harness.engines.local.pair_runners import PairRunners, open_runners
from harness.engines.local.rules import warp_of
from harness.engines.local.runner_choice import Demanded
from harness.engines.pair import Pair, PlacedPair, plan_pair
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import generate
from harness.measuring.encoding import Encoded
from harness.measuring.progress import progress, say
from harness.measuring.session import Session
from harness.models.case import Demand
from harness.prompts.sets import Prompt, load_prompts
from harness.records.experiment import Experiment
from harness.results.locked_files import replace_file
from harness.results.statistics.iterations import (
    Cut,
    acceptance_chances,
    cut,
    tokens_per_iteration,
)
from harness.results.verdict import MOST_DEVIATIONS, MOST_IMPOSSIBLE, drafter_health
from harness.tables.table import Document

# Texts that are taken where nothing is said: written now, or those that a file has.
WRITTEN = 15
GIVEN = 256


@dataclass(frozen=True)
class ReadText:
    """What the target computes over a text of n tokens.

    Attributes:
        probabilities: [n], of each token.
        hidden: [prompt and text but its last token, L, D], of the layers that the drafter reads; None for none.
        log_probability: of the tokens that it can draw, summed.
        expected, variance: of the same sum, if each token were drawn by the target.
        num_impossible: tokens that it cannot draw.
    """

    probabilities: Tensor
    hidden: Tensor | None
    log_probability: float
    expected: float
    variance: float
    num_impossible: int


class Acceptance(Experiment):
    """Texts, the probabilities of their tokens under both models, and how they are cut into iterations.

    Attributes:
        texts: a row for each text that was read.
        cuts: of the same texts.
        variances: of their log-probabilities.
        costs: of an iteration in target steps, for each K; empty where they are unknown.
        measured: the run of `latency` that measured what an iteration costs; None for the bytes.
        served: of an engine elsewhere: its answers.
        served_k: the K that it drafts with, as far as it reports it.
        most: the largest K that is computed.
        pair, placed: the models loaded here.
    """

    def __init__(self, settings: AcceptanceSettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        known = [prompt for prompt in self.prompt_set.prompts if prompt.completion is not None]
        self.source = "given" if known else "written"
        if 0 < len(known) < len(self.prompt_set.prompts):
            say(
                f"{len(self.prompt_set.prompts) - len(known)} prompts without an answer are left out"
            )
            self.prompt_set = dataclasses.replace(self.prompt_set, prompts=tuple(known))
        asked = settings.num_prompts
        automatic = min(len(known), GIVEN) or WRITTEN
        self.prompts = self.prompt_set.take(automatic if asked == "auto" else asked)
        self.measured: Run | None = None
        if settings.costs != "bytes":
            self.measured = newest_of_pair(
                "costs",
                LatencyRow,
                settings,
                lambda run: costs_in_steps(run.row("regular"), run.last) is not None,
                " whose costs are known",
            )
        self.texts: list[AcceptanceTextRow] = []
        self.cuts: list[Cut] = []
        self.variances: list[float] = []
        self.costs: list[float] = []
        self.served: list[RequestRecord] = []
        self.served_k: int | None = None
        self.most = settings.up_to
        self.pair: Pair | None = None
        self.placed: PlacedPair | None = None

    def measure(self, session: Session) -> None:
        settings = self.settings
        decoding = settings.decoding
        tokenizer = session.tokenizer
        completions = [completion_ids(tokenizer, prompt) for prompt in self.prompts]
        longest_answer = max(map(len, completions)) or decoding.max_new_tokens
        encoded = session.encode_set(self.prompt_set, self.prompts, longest_answer)
        session.place(
            min(settings.batch_size, len(encoded.prompts)), encoded.longest, longest_answer
        )
        by_index = dict(zip([prompt.index for prompt in self.prompts], completions, strict=True))
        answers = [by_index[index] for index in encoded.indices]
        is_elsewhere = not engine_of(settings).own_loop
        if is_elsewhere or self.source == "written":
            answers = self._written(session, encoded, -1 if is_elsewhere else 0)
        if is_elsewhere:
            self.source = "served"
            self.served_k = max(
                (k for request in self.served for k, _ in request.outcomes), default=None
            )
            self.most = max(settings.up_to, self.served_k or 0)
        self.placed = session.placed or self._placed_here(encoded, answers)
        self.pair = session.pair if session.placed is not None else self.placed.load()
        self._read(session, encoded, answers)
        if not self.cuts:
            raise SettingError(
                "prompts", "has no answer of two tokens or more", settings.prompts.name
            )
        self.costs = self._costs(encoded)

    def _placed_here(self, encoded: Encoded, answers: Sequence[Sequence[int]]) -> PlacedPair:
        """The models of an engine that computes elsewhere."""
        settings = self.settings
        planned = plan_pair(settings.model, settings.draft, settings.placement, settings.dtype)
        longest = max(map(len, answers))
        demand = Demand(1, encoded.longest, longest, settings.up_to, "eager")
        return planned.place(demand, force=settings.force)

    def _written(self, session: Session, encoded: Encoded, arm: int) -> list[list[int]]:
        """The answers of an arm: the target's own, or those of an engine that speculates."""
        engine = session.open(self.settings.batch_size, encoded.longest)
        batches = in_batches(range(len(encoded.prompts)), self.settings.batch_size)
        answers: list[list[int]] = []
        with progress("writing texts", len(batches)) as advance:
            for batch in batches:
                part = encoded.part(batch)
                question = session.ask(part.token_ids, part.indices, chats=part.chats)
                generation = generate(engine, engine.arms[arm], question)
                answers += generation.tokens
                self.served += generation.requests
                advance(None)
        session.close()
        return answers

    def _read(self, session: Session, encoded: Encoded, answers: Sequence[Sequence[int]]) -> None:
        """Read the texts with both models."""
        decoding = self.settings.decoding
        assert self.pair is not None
        demanded = Demanded(decoding=decoding, runner="eager", longest_prompt=encoded.longest)
        runners = open_runners(self.pair, demanded, say)
        assert runners.make_drafter is not None
        drafter = runners.make_drafter(warp_of(decoding))
        with progress("reading texts", len(answers)) as advance:
            for prompt, prompt_ids, answer in zip(
                encoded.prompts, encoded.token_ids, answers, strict=True
            ):
                if len(answer) > 1:
                    self._read_one(session, runners, drafter, prompt, prompt_ids, answer)
                advance(None)
        runners.close()

    @torch.inference_mode()
    def _read_one(
        self,
        session: Session,
        runners: PairRunners,
        drafter: Drafter,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        answer: Sequence[int],
    ) -> None:
        settings = self.settings
        assert self.pair is not None
        device = self.pair.target.input_device
        read = read_text(
            runners,
            warp_of(settings.decoding),
            prompt_ids,
            answer,
            device,
        )
        found = probabilities_along(drafter, prompt_ids, answer, read.hidden, self.most)
        if found is None:
            assert settings.draft is not None
            rule = "draws its tokens, and gives no probabilities to a text: its class needs a method `along`"
            raise SettingError("draft", rule, settings.draft.name)
        chances = acceptance_chances(
            read.probabilities.cpu().numpy(),
            found.cpu().numpy(),
            block=settings.decoding.rule == "block",
        )
        of_text = cut(chances)
        row = session.row(
            AcceptanceTextRow,
            prompt_index=prompt.index,
            category=prompt.category,
            prompt=prompt.text,
            completion=session.tokenizer.decode(list(answer), skip_special_tokens=True),
            token_ids=list(answer),
            num_tokens=of_text.num_tokens,
            iterations_by_num_draft_tokens=[
                round(float(number), 6) for number in of_text.iterations
            ],
            log_probability=read.log_probability,
            own_log_probability=read.expected,
            num_impossible=read.num_impossible,
        )
        session.append(TEXTS_FILE, [row])
        self.texts.append(row)
        self.cuts.append(of_text)
        self.variances.append(read.variance)

    def _costs(self, encoded: Encoded) -> list[float]:
        """What an iteration costs for each K, in target steps: by the bytes that it must read, or as `latency`
        measured it.
        """
        placed = self.placed
        assert placed is not None
        numbers = range(1, self.most + 1)
        in_one_pass = placed.sketches[-1].drafts_in_one_pass
        if self.measured is not None:
            run = self.measured
            costs = costs_in_steps(run.row("regular"), run.last)
            proposed = proposed_per_iteration(run.last)
            assert costs is not None
            assert proposed is not None
            # Of a pass over more tokens each adds as much as in the run.
            verifying = (costs.verify - 1) / proposed
            drafted = [proposed if in_one_pass else number for number in numbers]
            return [
                1 + number * verifying + steps * costs.draft
                for number, steps in zip(numbers, drafted, strict=True)
            ]
        mean_answer = sum(len(text.token_ids or ()) for text in self.texts) // len(self.texts)
        prompt_tokens = round(encoded.mean_length)
        demand = Demand(1, prompt_tokens, mean_answer, num_draft_tokens=self.most, runner="eager")
        case = placed.case(placed.free, demand)
        if not all(sketch.knows_cache for sketch in case.models):
            return []
        _, step = iteration_bytes(case, placed.placements, 0)
        return [sum(iteration_bytes(case, placed.placements, number)) / step for number in numbers]

    def rows(self, session: Session) -> list[AcceptanceRow]:
        settings = self.settings
        common: dict[str, Any] = {
            "prompts_digest": self.prompt_set.digest,
            "text_source": self.source,
        }
        if not self.cuts:
            return [session.row(AcceptanceRow, **common)]
        num_tokens = sum(text.num_tokens for text in self.cuts)
        num_read = sum(len(text.token_ids or ()) for text in self.texts)
        num_impossible = sum(text.num_impossible or 0 for text in self.texts)
        num_possible = num_read - num_impossible
        found = sum(text.log_probability or 0 for text in self.texts)
        expected = sum(text.own_log_probability or 0 for text in self.texts)
        deviation = math.sqrt(sum(self.variances))
        common |= {
            "num_texts": len(self.cuts),
            "num_tokens": num_tokens,
            "log_probability": found / num_possible if num_possible else None,
            "own_log_probability": expected / num_possible if num_possible else None,
            "likelihood_z": (found - expected) / deviation if deviation else None,
            "impossible_share": num_impossible / num_read,
        }
        intervals = tokens_per_iteration(self.cuts, settings.num_resamples, settings.seed)
        rows = []
        for place, tokens in enumerate(intervals):
            iterations = sum(text.iterations[place] for text in self.cuts)
            drafted = sum(text.drafted[place] for text in self.cuts)
            proposed = sum(text.proposed[place] for text in self.cuts)
            tested = sum(text.tested[place] for text in self.cuts)
            accepted_at = np.sum(
                [text.accepted_at[place, : place + 1] for text in self.cuts], axis=0
            )
            accepted = num_tokens - iterations
            figures = common | {"num_draft_tokens": place + 1, "tokens_per_iteration": tokens}
            if drafted:
                figures["acceptance_rate"] = accepted / proposed
                figures["conditional_acceptance_rate"] = accepted / tested
                figures["mean_acceptance_length"] = 1 + accepted / drafted
                marginal = [round(float(number), 4) for number in accepted_at / drafted]
                figures["marginal_acceptance_by_position"] = marginal
            if self.costs:
                cost = self.costs[place]
                figures["expected_speedup"] = tokens.scaled(1 / cost)
                figures |= {"iteration_cost": cost, "cost_source": settings.costs}
            if self.source == "served" and place + 1 == self._k_of_engine():
                figures |= self._health(place, common)
            rows.append(session.row(AcceptanceRow, **figures))
        plots = optional_plots()
        if plots is not None:
            for name, content in plots.picture_files(
                lambda: RECORD.plots([Run(list(rows))])
            ).items():
                replace_file(session.directory / name, content.encode())
        return rows

    def _k_of_engine(self) -> int:
        """The K that the engine reports, else that of the settings."""
        number = self.settings.decoding.num_draft_tokens
        return self.served_k or (number if number != "auto" else self.most)

    def _health(self, place: int, common: dict[str, Any]) -> dict[str, Any]:
        """Columns about what the engine accepted, and what the weights say about its K."""
        answers = [request for request in self.served if len(request.token_ids) > 1]
        reported = []
        for request, text in zip(answers, self.cuts, strict=True):
            if request.outcomes:
                reported.append(len(request.outcomes))
            elif request.sums is not None:
                reported.append(text.num_tokens - request.sums.num_accepted)
        counted = sum(reported) if len(reported) == len(answers) else None
        own_texts = (
            abs(common["likelihood_z"] or 0.0) <= MOST_DEVIATIONS
            and common["impossible_share"] <= MOST_IMPOSSIBLE
        )
        num_tokens = common["num_tokens"]
        expected = sum(text.iterations[place] for text in self.cuts)
        variance = sum(text.variance[place] for text in self.cuts)
        health, allowed = drafter_health(
            num_tokens, counted, expected, variance, own_texts=own_texts
        )
        return {
            "health": health,
            "served_tokens_per_iteration": num_tokens / counted if counted else None,
            "weights_tokens_per_iteration": allowed,
        }

    def judge(self, rows: Sequence[AcceptanceRow]) -> None:
        """Raises VerdictError for an engine that does not accept what its weights say, or where that is unknown."""
        for row in rows:
            if row.health in EXIT_CODES:
                raise VerdictError(health_in_words(row), EXIT_CODES[row.health])

    def document(self, rows: Sequence[AcceptanceRow]) -> Document:
        return acceptance_document(rows, self.texts, self.cuts)


def completion_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The tokens of a prompt's answer; none without one."""
    completion = prompt.completion
    if completion is None or isinstance(completion, tuple):
        return list(completion or ())
    if prompt.messages is None:
        # A tokenizer may begin a text with a space, which an answer in the middle of it does not have.
        before = tokenizer(prompt.text)["input_ids"]
        whole = tokenizer(prompt.text + completion)["input_ids"]
        if whole[: len(before)] == before:
            return list(map(int, whole[len(before) :]))
    return list(map(int, tokenizer(completion, add_special_tokens=False)["input_ids"]))


def read_text(
    runners: PairRunners,
    warp: Any,
    prompt: Sequence[int],
    text: Sequence[int],
    device: torch.device,
) -> ReadText:
    """Read a prompt and a text with the target."""
    found = []
    hidden = []
    expected = variance = 0.0
    for begin, step in read_along(runners.target, prompt, text[:-1], device):
        probabilities = warp(step.logits if begin < 0 else step.logits[0])
        of_tokens = chosen(probabilities, text[begin + 1 : begin + 1 + len(probabilities)])
        found.append(of_tokens)
        if step.hidden is not None:
            hidden.append(step.hidden[0])
        # Of the token at each place, if it were drawn: the mean and the variance of its log-probability. Places
        # with a token that cannot be drawn are left out, here and in what was found.
        logarithms = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
        means = (probabilities * logarithms).sum(-1)
        squares = (probabilities * logarithms.square()).sum(-1)
        possible = of_tokens > 0
        expected += float(means[possible].sum())
        variance += float((squares - means.square()).clamp(min=0)[possible].sum())
    of_text = torch.cat(found)
    possible = of_text > 0
    return ReadText(
        probabilities=of_text,
        hidden=torch.cat(hidden) if hidden else None,
        log_probability=float(of_text[possible].log().sum()),
        expected=expected,
        variance=variance,
        num_impossible=int((~possible).sum()),
    )


EXPERIMENT = Acceptance
