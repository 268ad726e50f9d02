"""Requests in flight, or at a rate, by costs that were measured: they are answered on the simulated engine's clock.

A prompt takes what the first token of a request alone takes. What an iteration takes has to be found: in the measured
time prompts of others were read. It is the time with which the simulated engine's answers take as long as the measured
ones did at each load, and lies on straight lines between loads. Whether prompts that wait are read together follows
from the measured times to the first token.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings
from harness.config.synthetic import conditional_rates
from harness.engines.protocol import Question
from harness.engines.record import Opening
from harness.engines.requests import RequestRecord
from harness.engines.simulated.record import Simulated
from harness.engines.simulated.settings import NAME, SimulatedSettings
from harness.measuring.figures.goodput import is_good
from harness.results.cost_tables import Served
from harness.results.iteration_cost import Answers, IterationCost

# Requests that are answered for a prediction, and for each try to find the times behind a measured load.
_NUM_REQUESTS = 256
_NUM_TRIED = 64
_MOST_TRIES = 4
_NEAR = 0.005
# Times the requests in flight: of a lap of `latency` that has prompts enough.
_LONGEST_LAP = 4
# A client's next request comes when the next iteration of the others has begun.
_GAP_MS = 1.0
# This share of iterations may have more rows than were ever measured: they count as the most that were.
_BEYOND = 0.05


class Load(NamedTuple):
    """What is asked of an engine.

    Attributes:
        in_flight: requests that are kept in flight; None at a rate.
        rate: requests per second at random (Poisson) times.
        slo: the most milliseconds of a good request, by name.
    """

    in_flight: int | None
    rate: float | None
    slo: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class _Priced(SimulatedSettings):
    """Times in place of planted ones.

    Attributes:
        iterations: milliseconds by rows in flight.
        seen: how many iterations had so many rows.
    """

    iterations: Mapping[int, float] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)

    def iteration_ms(self, num_draft_tokens: int, num_rows: int = 1) -> float:
        self.seen[num_rows] += 1
        return float(np.interp(num_rows, [*self.iterations], [*self.iterations.values()]))


class UnderLoad:
    """Predictions under load by one draft's costs.

    Raises:
        SettingError: by `served`: a width was not measured with requests.
    """

    def __init__(self, cost: IterationCost, settings: RunSettings, load: Load) -> None:
        self.cost = cost
        self.settings = settings
        self.load = load
        self._priced: dict[int, _Priced] = {}

    def served(self, k: int, tokens: float, lap: float | None = None) -> Served:
        """Requests that are answered with K draft tokens, or with none, at so many tokens per iteration.

        Raises:
            SettingError: the times to the first token are unknown, or more requests are in flight than were measured.
        """
        if k not in self._priced:
            self._priced[k] = self._found(k)
        in_flight = self.load.in_flight or 1
        lap = lap or (_LONGEST_LAP * in_flight if self.load.rate is None else _NUM_REQUESTS)
        answers = Answers(0.0, self.settings.decoding.max_new_tokens, tokens, lap)
        priced = dataclasses.replace(self._priced[k], rate=self.load.rate, seen=Counter())
        served = self._answered(priced, k, answers, in_flight, _NUM_REQUESTS)
        most = max(priced.iterations)
        beyond = sum(number for rows, number in priced.seen.items() if rows > most)
        if beyond > _BEYOND * priced.seen.total():
            rule = (
                f"has no price of what rate={self.load.rate:g} keeps in flight{f' at K={k}' if k else ''}: more than"
                f" {most} in {beyond / priced.seen.total():.0%} of the iterations: ask for a lower rate, or measure"
                f" batch_size={2 * most}"
            )
            raise SettingError("costs", rule)
        return served

    def _found(self, k: int) -> _Priced:
        """The times with which answers take as long as they did."""
        known = [
            point
            for point in self.cost.points
            if point.width == k + 1 and point.answers and point.rows not in self.cost.refused
        ]
        known.sort(key=lambda point: point.rows)
        if not known or known[0].answers is None or known[0].rows > 1:
            name = f"K={k}" if k else "the regular arm"
            rule = f"has no time to the first token of requests one at a time of {name}: measure batch_size=1"
            raise SettingError("costs", rule)
        found = []
        for reads_together in (False, True):
            priced = _Priced(
                first_ms=known[0].answers.first_ms,
                prompt_ms=0.0,
                gap_ms=_GAP_MS,
                noise=0.0,
                prompts_differ=0.0,
                reads_together=reads_together,
            )
            off = 0.0
            for point in known:
                assert point.answers is not None
                ms = point.ms.estimate
                for _ in range(_MOST_TRIES):
                    iterations = {**priced.iterations, point.rows: ms}
                    tried = dataclasses.replace(priced, iterations=iterations)
                    served = self._answered(tried, k, point.answers, point.rows, _NUM_TRIED)
                    missing = point.ms.estimate / point.answers.tokens / served.ms_per_token
                    if abs(missing - 1) < _NEAR:
                        break
                    ms *= missing
                priced = dataclasses.replace(
                    priced, iterations={**priced.iterations, point.rows: ms}
                )
                off += abs(math.log(served.first_ms / point.answers.first_ms))
            found.append((off, reads_together, priced))
        return min(found, key=lambda one: one[:2])[2]

    def _answered(
        self, priced: _Priced, k: int, answers: Answers, in_flight: int, number: int
    ) -> Served:
        """As `latency` asks: in laps, and with others that keep up the load until the last has ended."""
        priced = dataclasses.replace(priced, acceptance=_chance(answers.tokens, k))
        decoding = dataclasses.replace(
            self.settings.decoding,
            num_draft_tokens=k or 1,
            max_new_tokens=max(2, round(answers.length)),
        )
        settings = dataclasses.replace(
            self.settings,
            engine=priced,
            draft=DraftSettings(name=NAME, method=NAME),
            decoding=decoding,
        )
        nothing: Any = None
        opening = Opening(
            decoding=decoding,
            batch_size=in_flight,
            settings=settings,
            planned=nothing,
            load=nothing,
        )
        arm = Simulated().open(opening).arms[1 if k else 0]
        size = round(answers.lap)
        extra = Question([[0]] * in_flight, decoding, settings.seed, range(in_flight))
        is_kept_up = priced.rate is not None or in_flight > 1
        requests: list[RequestRecord] = []
        seconds = offered_s = 0.0
        for lap in range(max(1, number // size)):
            indices = range(lap * size, (lap + 1) * size)
            question = Question([[0]] * size, decoding, settings.seed, indices)
            answered = arm.answer(
                question.requests, in_flight, extra.requests if is_kept_up else ()
            )
            requests += answered.requests
            seconds += answered.seconds
            if answered.load is not None:
                offered_s += answered.load.offered_s
        if priced.rate is not None:
            # As if the random times had come out at exactly that rate.
            seconds *= len(requests) / priced.rate / offered_s
        return _served(requests, seconds, self.load.slo)


def _served(
    requests: Sequence[RequestRecord], seconds: float, slo: Mapping[str, float] | None
) -> Served:
    decoding_ms = sum(one.decode_ms or 0.0 for one in requests)
    num_tokens = sum(one.num_tokens for one in requests)
    first_ms = [one.time_to_first_token_ms or 0.0 for one in requests]
    good = None
    if slo:
        good = sum(is_good(one, slo) for one in requests) / len(requests)
    return Served(
        num_tokens / seconds,
        float(np.median(first_ms)),
        decoding_ms / (num_tokens - len(requests)),
        good,
    )


def _chance(tokens: float, k: int) -> float:
    """The chance that each draft token is accepted, of which so many tokens per iteration follow."""
    if not k or tokens <= 1:
        return 0.0
    [chance] = conditional_rates(min(tokens, k + 1), k)
    return chance
