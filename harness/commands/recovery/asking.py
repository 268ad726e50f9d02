"""Asks an arm the requests of a run, so many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.workload import Answer, PlannedRequest, Workload
from harness.config.errors import RunError
from harness.engines.arrivals import Arrival
from harness.engines.protocol import Arm
from harness.engines.timing import quick_garbage_collections
from harness.measuring.progress import progress

# A round has fewer.
_MOST_REQUESTS = 10**6


@dataclass(frozen=True)
class Asking:
    """What the arms of a run are asked.

    Attributes:
        prompts: token ids of each.
        samplings: the sampling settings that are tested; the run's own one is the first.
        end_tokens: those at which the target ends a text.
    """

    settings: RecoverySettings
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[Sampling]
    end_tokens: frozenset[int]

    def workload(self, number: int = 1) -> Workload:
        """The requests, from the first one on; those of another round have other random numbers."""
        settings = self.settings
        first = (number - 1) * _MOST_REQUESTS
        return Workload(self.prompts, self.samplings, settings.decoding, settings.seed, first)

    def ask(
        self, arm: Arm, planned: Sequence[PlannedRequest], num_in_flight: int, doing: str
    ) -> list[Answer]:
        """The answers in the order of the requests. Raises RunError where one failed."""
        requests = [each.request(self.settings.seed) for each in planned]
        num_missing = [each.leave_after or each.num_tokens for each in planned]
        with progress(doing, len(requests)) as advance, quick_garbage_collections():

            def watch(arrivals: Sequence[Arrival]) -> None:
                for arrival in arrivals:
                    num_missing[arrival.row] -= len(arrival.tokens)
                    if num_missing[arrival.row] <= 0:
                        advance(None)

            records = arm.answer(requests, num_in_flight, watch=watch).requests
        failed = [record for record in records if record.error is not None]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(requests)} requests failed {doing}: {failed[0].error}"
            )
        return [Answer(*answered) for answered in zip(planned, records, strict=True)]
