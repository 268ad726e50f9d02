"""Planted costs and acceptance of `engine=simulated`, and what disturbs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.engines import EngineSettings
from harness.config.settings import require
from harness.results.schema import SIMULATED

_MOST_MS = 1e7
# The most that settings may be, beyond which numbers overflow or no run ends.
_BOUNDS: Mapping[Sequence[str], float] = {
    ("step_ms", "width_ms", "row_ms", "draft_ms", "prompt_ms", "first_ms", "stall_ms"): _MOST_MS,
    ("prompts_differ", "noise", "start_noise"): 10,
    ("rate", "drift"): 100,
    ("stall_every", "blocks"): 1e6,
}


@dataclass(frozen=True, kw_only=True)
class SimulatedSettings(EngineSettings):
    """Settings of `engine=simulated`: what an iteration costs and yields, and what disturbs it.

    Attributes:
        step_ms: a regular step, one pass of the target over one token of one row.
        width_ms: added to a pass for each further token of a row that it verifies, K in all.
        row_ms: added to a pass for each further row in flight.
        jumps: by the tokens of a row that a pass verifies, milliseconds that it takes more from there on: `{9: 8.0}`.
        draft_ms: drafting one token, of all rows together.
        prompt_ms: reading one token of a prompt.
        first_ms: added to each prompt, such as network time.
        acceptance: the chance that a draft token is accepted if those before it were: one number, or one for each
            position.
        prompts_differ: how far prompts differ in that, as a standard deviation of its log-odds.
        lengths: tokens of answers where they may end by themselves (`decoding.ignore_eos=false`), one after the other.
        noise: standard deviation of the logarithm of each iteration's time.
        start_noise: the same from start to start, of each arm.
        stall_every: one in this many iterations stalls, at random; 0 for none.
        stall_ms: how long a stall lasts.
        drift: how much slower everything is after a minute of the engine's clock, as a share.
        blocks: how often each arm is started; 0 for once, without blocks.
        rate: requests per second on average, at random (Poisson) times; None to keep `batch_size` in flight.
    """

    name: str = SIMULATED
    step_ms: float = 20.0
    width_ms: float = 0.5
    row_ms: float = 0.5
    jumps: Mapping[int, float] | None = None
    draft_ms: float = 2.0
    prompt_ms: float = 0.1
    first_ms: float = 5.0
    acceptance: float | tuple[float, ...] = 0.8
    prompts_differ: float = 0.3
    lengths: tuple[int, ...] = ()
    noise: float = 0.02
    start_noise: float = 0.0
    stall_every: int = 0
    stall_ms: float = 0.0
    drift: float = 0.0
    blocks: int = 0
    rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_ms", "rate"):
            value = getattr(self, name)
            require(value is None or value >= 1e-6, name, "must be at least 1e-6", value)
        for names, most in _BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                rule = f"must be from 0 to {most:g}"
                require(value is None or 0 <= value <= most, name, rule, value)
        for width, ms in (self.jumps or {}).items():
            rule = f"must be milliseconds from 0 to {_MOST_MS:g} by width, from 1 on"
            require(width >= 1 and 0 <= ms <= _MOST_MS, "jumps", rule, f"{{{width}: {ms}}}")
        require(
            bool(self.acceptance_by_position), "acceptance", "must have a rate", self.acceptance
        )
        for chance in self.acceptance_by_position:
            require(0 <= chance <= 1, "acceptance", "must be from 0 to 1", chance)
        for length in self.lengths:
            require(length >= 1, "lengths", "must be at least 1", length)

    @property
    def acceptance_by_position(self) -> Sequence[float]:
        """The last one is that of all further positions."""
        return (self.acceptance,) if isinstance(self.acceptance, int | float) else self.acceptance

    @property
    def takes_k(self) -> bool:
        return True

    def pass_ms(self, width: int, num_rows: int = 1) -> float:
        """A pass of the target that verifies `width` tokens of each row."""
        jumps = sum(ms for first, ms in (self.jumps or {}).items() if width >= first)
        width_ms = num_rows * (width - 1) * self.width_ms
        return self.step_ms + (num_rows - 1) * self.row_ms + width_ms + jumps

    def iteration_ms(self, num_draft_tokens: int, num_rows: int = 1) -> float:
        """An iteration that drafts this many tokens of each row and verifies them: the planted truth."""
        return num_draft_tokens * self.draft_ms + self.pass_ms(num_draft_tokens + 1, num_rows)
