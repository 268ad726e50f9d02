"""The rows of `latency`: one per arm, and one per prompt and arm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.results.files import rows_in
from harness.results.row import Row, figure, pooled, setting, with_interval
from harness.results.schema import (
    ComparedRow,
    MaybeBool,
    MaybeFloat,
    MaybeInt,
    MaybeText,
    PromptedRow,
)
from harness.results.statistics.interval import Interval

# In the directory of a run: one row per prompt and arm.
PROMPTS_FILE = "latency_prompts.csv"
# A machine counts as quiet if the process got at least this share of the processor time it asked for.
QUIET = 0.9
# About a month.
_MOST_MS = 3e9


@dataclass(frozen=True, kw_only=True)
class LatencyRow(PromptedRow, ComparedRow):
    """`latency.csv`: one row per arm."""

    kind = "latency"
    filled_if_measured = ("ms_per_token",)
    recognised_by = ("arm", "ms_per_token", "speedup", "tokens_per_second")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = pooled("same", "`regular` or `speculative`")
    num_prompts: MaybeInt = pooled("mean", "prompts measured; every turn of a conversation is one")
    precision: MaybeFloat = setting(
        "half of the width of the speed-up's interval, as a share of it, at which the run was to stop",
        "half_width",
    )
    stopped_by: MaybeText = pooled(
        "same",
        "what ended a run with `precision`: that it was reached, the last prompt, or `budget`; its intervals have a"
        " level of 97 %, so that they cover 95 % although they were looked at",
    )
    num_different_prompts: MaybeInt = pooled(
        "mean",
        "different ones among them, where `num_prompts` is above those of the set, which are then asked again",
    )
    salted: MaybeBool = pooled(
        "all",
        "whether requests had a salt of the run, so that a server's prefix cache does not know their prompts from"
        " before; empty where nothing is cached between questions",
    )
    smallest_batch: MaybeInt = pooled(
        "smallest", "rows of the smallest batch: the last one may not have been full"
    )
    num_tokens: MaybeInt = pooled("mean", "tokens generated over all prompts", "tokens")
    shortest_answer: MaybeInt = pooled("smallest", "tokens of the shortest answer", "tokens")
    longest_answer: MaybeInt = pooled("largest", "tokens of the longest answer", "tokens")
    ms_per_token: MaybeFloat = pooled(
        "mean", "time per token of a row, with the prompt's pass; mean over batches", "ms"
    )
    ms_per_token_median: MaybeFloat = pooled("mean", "median of the same", "ms")
    ms_per_token_std: MaybeFloat = pooled(
        "mean", "standard deviation of the same, over prompts or batches", "ms"
    )
    tokens_per_second: MaybeFloat = pooled("mean", "tokens of all rows over total time", "tokens/s")
    tokens_per_second_per_user: MaybeFloat = pooled(
        "mean", "1000 / `ms_per_token`: what a row's reader gets", "tokens/s"
    )
    time_to_first_token_ms: MaybeFloat = pooled("mean", "mean time to the first token", "ms")
    time_to_first_token_p50_ms: MaybeFloat = pooled(
        "mean", "median of the same, over requests to a server", "ms"
    )
    time_to_first_token_p90_ms: MaybeFloat = pooled("mean", "90th percentile of the same", "ms")
    time_to_first_token_p95_ms: MaybeFloat = pooled("mean", "95th percentile of the same", "ms")
    time_to_first_token_p99_ms: MaybeFloat = pooled("mean", "99th percentile of the same", "ms")
    server_time_to_first_token_ms: MaybeFloat = pooled(
        "mean", "mean time to the first token by the server's own clock and metrics", "ms"
    )
    time_per_output_token_p50_ms: MaybeFloat = pooled(
        "mean",
        "median over requests of the mean time per token after the first"
        " (TPOT of vLLM, inter-token latency of AIPerf)",
        "ms",
    )
    time_per_output_token_p90_ms: MaybeFloat = pooled("mean", "90th percentile of the same", "ms")
    time_per_output_token_p95_ms: MaybeFloat = pooled("mean", "95th percentile of the same", "ms")
    time_per_output_token_p99_ms: MaybeFloat = pooled("mean", "99th percentile of the same", "ms")
    inter_token_latency_p50_ms: MaybeFloat = pooled(
        "mean",
        "median time between two arrivals of a request, each of one or more tokens (ITL of vLLM);"
        " tokens that come within a tenth of its mean time per token are one arrival",
        "ms",
    )
    inter_token_latency_p90_ms: MaybeFloat = pooled("mean", "90th percentile of the same", "ms")
    inter_token_latency_p95_ms: MaybeFloat = pooled("mean", "95th percentile of the same", "ms")
    inter_token_latency_p99_ms: MaybeFloat = pooled("mean", "99th percentile of the same", "ms")
    tokens_per_arrival: MaybeFloat = pooled(
        "mean",
        "tokens that arrived together, on average: above 1 the server sends bursts",
        "tokens",
    )
    mean_in_flight: MaybeFloat = pooled(
        "mean",
        "requests that a server had in flight, on average, from the first of a lap until its last had ended; those"
        " that only keep up the load count as well",
        "requests",
    )
    offered_rate: MaybeFloat = pooled(
        "mean",
        "requests per second that were sent, as the random times for `engine.rate` came out",
        "requests/s",
    )
    requests_per_second: MaybeFloat = pooled(
        "mean",
        "requests that were answered, over total time, less the share of it that went to those that only kept up the"
        " load",
        "requests/s",
    )
    slo: dict[str, float] | None = setting(
        "most milliseconds to the first token (`ttft_ms`) and per token after it (`itl_ms`), as JSON",
        "engine.slo",
        "ms",
    )
    goodput: MaybeFloat = pooled("mean", "requests per second within `slo`", "requests/s")
    goodput_share: MaybeFloat = pooled("mean", "share of the requests within `slo`")
    goodput_ratio: Interval | None = with_interval(
        "mean", "`goodput` over the regular arm's", ends="paired 95 % interval over laps"
    )
    server_tokens: MaybeInt = pooled(
        "mean",
        "new tokens that the server counted while the arm was measured, by its metrics",
        "tokens",
    )
    foreign_tokens: MaybeInt = pooled(
        "largest", "those of them that were not ours; 0 within a token a request and 1 %", "tokens"
    )
    unseen_tokens: MaybeInt = pooled(
        "largest",
        "tokens that arrived and that the server did not count, as one worker of several does; 0 within a token"
        " a request and 1 %",
        "tokens",
    )
    num_uncounted: MaybeInt = pooled(
        "largest", "laps without figures from the server's metrics, which could not be read or fell"
    )
    num_restarts: MaybeInt = pooled(
        "largest", "how often the server was restarted meanwhile, by its metrics"
    )
    drafted: MaybeBool = pooled(
        "any", "whether the server drafted tokens, as its answers or its metrics say"
    )
    num_preemptions: MaybeInt = pooled(
        "largest",
        "how often the server took the cache of a running request for others, by its metrics",
    )
    acceptance_source: MaybeText = pooled(
        "same",
        "`metrics` where acceptance is that of the server's counters, because its answers tell none",
    )
    num_failed: MaybeInt = pooled(
        "largest", "requests that failed, time-outs too; the other figures leave them out"
    )
    num_timed_out: MaybeInt = pooled("largest", "requests that took longer than `engine.timeout_s`")
    num_sent_again: MaybeInt = pooled(
        "largest", "requests sent a second time: the server had closed a kept-alive connection"
    )
    cached_tokens: MaybeInt = pooled(
        "mean",
        "tokens of prompts that the server took from a cache, as its answers or its metrics say",
        "tokens",
    )
    read_prompt_tokens: MaybeInt = pooled(
        "mean", "tokens of all prompts by the server's count", "tokens"
    )
    cached_from_before: MaybeInt = pooled(
        "largest",
        "those of them, of prompts asked for the first time, that no other prompt of the run begins with",
        "tokens",
    )
    num_prompt_tokens: MaybeInt = pooled("mean", "tokens of all prompts", "tokens")
    decode_speedup: Interval | None = with_interval(
        "mean",
        "the same without the time until the first tokens: the longer the answers, the closer is `speedup` to it",
        ends="95 % paired interval",
    )
    visible_difference: MaybeFloat = pooled(
        "none",
        "a difference between the arms of this share is found four times in five; smaller ones less often",
    )
    drift: Interval | None = with_interval(
        "mean",
        "speed-up in the second half of the run over that in the first",
        ends="95 % interval",
    )
    drifted: MaybeBool = pooled("any", "whether that is significant and above 2 %")
    processor_share: MaybeFloat = pooled(
        "smallest",
        "CPU time received / requested (run / (run + wait)) during the measurement",
    )
    load: MaybeFloat = pooled("largest", "load average over the last minute, at the end")
    num_cores: MaybeInt = pooled("smallest", "cores that the process may use")
    other_gpu_processes: MaybeInt = pooled(
        "largest", "most processes on one of these GPUs at once, other than the run's own, by NVML"
    )
    lowest_gpu_clock_mhz: MaybeInt = pooled(
        "smallest", "lowest clock of a GPU's cores, by NVML", "MHz"
    )
    gpu_throttled: MaybeText = pooled("same", "why clocks of a GPU were lowered meanwhile, by NVML")
    num_units: MaybeInt = pooled("mean", "prompts, batches or laps during which GPUs were watched")
    num_throttled_units: MaybeInt = pooled("mean", "those of them at whose end clocks were lowered")
    joules_per_token: MaybeFloat = pooled(
        "mean",
        "energy of the GPUs per token, by NVML, what they take when idle included; empty for instances"
        " of a GPU (MIG), and where a tenth of the answers was too short to be counted",
        "J",
    )
    energy_ratio: Interval | None = with_interval(
        "mean",
        "regular / speculative energy per token, totals over units",
        ends="95 % paired interval",
    )
    reproducible: MaybeBool = pooled(
        "all",
        "`False` where the same settings give other texts: K of `auto` follows measured times",
    )
    interleaved: MaybeBool = pooled(
        "all", "whether the arms took turns; `False` where drift of the machine is not excluded"
    )
    aa_ratio: Interval | None = with_interval(
        "mean",
        "`speedup` of the regular arm over itself, measured before with `engine.aa=true`",
        ends="95 % paired interval",
    )
    predicted_speedup: MaybeFloat = pooled(
        "mean", "tokens per iteration / (K c + v), with measured c and v"
    )
    acceptance_by_position: list[float | None] | None = pooled(
        "mean", "accepted / tested at each draft position (conditional), as JSON"
    )
    marginal_acceptance_by_position: list[float | None] | None = pooled(
        "mean",
        "accepted / iterations at each draft position (marginal), as vLLM and llama.cpp print it, as JSON",
    )
    mean_acceptance_length_per_request: MaybeFloat = pooled(
        "mean",
        "mean over requests of their mean acceptance lengths; `mean_acceptance_length` pools iterations",
        "tokens",
    )
    acceptance_histogram: list[int] | None = pooled(
        "sum", "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    acceptance_by_rank: list[float] | None = pooled(
        "mean",
        "of trees: how often the first, second, ... child of a node was accepted, of the nodes that were reached and"
        " have such a child, as JSON",
    )
    acceptance_length_by_num_draft_tokens: list[Interval] | None = with_interval(
        "mean",
        "mean acceptance length if iterations had proposed at most 1, 2, ... of their tokens, as JSON;"
        " empty where that does not follow, as for trees, blocks and servers",
        ends="95 % intervals over prompts, as JSON",
        unit="tokens",
    )
    share_after_end: MaybeFloat = pooled(
        "mean", "share of the tokens that came after the end of their text, with `ignore_eos`"
    )
    acceptance_rate_before_end: MaybeFloat = pooled(
        "mean", "`acceptance_rate` of iterations that began before the end of the text"
    )
    acceptance_rate_after_end: MaybeFloat = pooled("mean", "the same after it")
    num_undivided_answers: MaybeInt = pooled(
        "sum", "answers that both leave out, because the place of their iterations is not known"
    )
    mean_proposed: MaybeFloat = pooled("mean", "draft tokens per iteration", "tokens")
    mean_num_draft_tokens: MaybeFloat = pooled(
        "mean", "the same over all iterations: K of `auto`", "tokens"
    )
    tokens_per_iteration: MaybeFloat = pooled(
        "mean", "tokens per iteration, over all iterations: 1 + accepted / iterations", "tokens"
    )
    greedy_acceptance_rate: MaybeFloat = pooled(
        "mean", "accepted / tested at temperature 0, asked of other engines where acceptance is low"
    )
    likeliest_share: MaybeFloat = pooled(
        "mean",
        "share of the target's draws that are its likeliest token, asked where acceptance is low",
    )
    suspicious: MaybeBool = pooled(
        "any",
        "True if sampled acceptance is implausibly low given greedy acceptance: suggests a verification bug",
    )
    draft_ms: MaybeFloat = pooled("mean", "drafting per iteration", "ms")
    verify_ms: MaybeFloat = pooled(
        "mean",
        "verification per iteration: the target's pass over K + 1 tokens, and the verdict",
        "ms",
    )
    pass_ms_by_width: list[float | None] | None = pooled(
        "mean",
        "a pass of the target over 1, 2, ... tokens, as JSON; null for widths that were not measured",
        "ms",
    )
    target_step_ms: MaybeFloat = pooled(
        "mean", "one forward pass of the target over one token, and the draw of the next", "ms"
    )
    target_8bit_share: MaybeFloat = pooled(
        "mean", "of a step of the target, spent in its 8-bit linear layers"
    )
    draft_8bit_share: MaybeFloat = pooled(
        "mean", "of drafting, spent in the draft's 8-bit linear layers"
    )
    iteration_ms: MaybeFloat = pooled("mean", "a whole iteration in the timed run", "ms")
    identical_prompts: MaybeInt = pooled("mean", "greedy texts equal to the regular arm's")
    tokens_per_difference: MaybeFloat = pooled(
        "mean",
        "of an engine elsewhere: greedy tokens up to each difference from the regular arm's text that rounding"
        " does not explain, as far as that is known",
        "tokens",
    )
    peak_memory_bytes: MaybeInt = pooled(
        "largest", "most GPU memory allocated or held by CUDA graphs, summed over GPUs", "bytes"
    )
    num_experts: MaybeInt = pooled(
        "mean", "experts in a layer of the target; empty for a dense model"
    )
    experts_per_step: MaybeFloat = pooled(
        "mean", "different experts of a layer that a regular step reads, all rows together"
    )
    experts_per_verification: MaybeFloat = pooled(
        "mean", "different experts of a layer that a verification reads, all rows together"
    )
    step_bytes: MaybeInt = pooled(
        "mean", "weights and cache that a step of the target reads", "bytes"
    )
    draft_step_bytes: MaybeInt = pooled(
        "mean", "weights and cache that a step of the draft reads", "bytes"
    )
    copy_bandwidth_bytes_per_s: MaybeFloat = pooled(
        "mean", "measured rate of a large copy in the target's memory", "bytes/s"
    )
    floor_ms: MaybeFloat = pooled("mean", "least time of a target step at that rate", "ms")
    draft_floor_ms: MaybeFloat = pooled("mean", "least time of a draft step", "ms")
    repeats: MaybeInt = setting(
        "how many runs were asked for; of a pooled row, were pooled", "repeats"
    )
    repeat: int | Literal["all"] | None = setting(
        "number of the run among its repetitions; `all` for the row that pools them, with means",
        "repeat",
    )
    pooled_runs: list[str] | None = pooled("none", "`run` of those that a row pools, as JSON")
    num_warmup: MaybeInt = setting("warm-up batches that were not counted", "num_warmup")
    laps: int | Literal["auto"] | None = setting(
        "how often the arms of an engine that keeps requests in flight take turns, or `auto`",
        "laps",
    )
    test: MaybeBool = setting("whether this was a short trial, `test=true`", "test")

    @property
    def was_served(self) -> bool:
        """Whether prompts were requests, each of which has its own time."""
        return self.requests_per_second is not None

    @property
    def was_quiet(self) -> bool:
        # A server computes elsewhere.
        share = 1.0 if self.url is not None else self.processor_share
        return not self.drifted and (share is None or share >= QUIET)


@dataclass(frozen=True, kw_only=True)
class LatencyPromptRow(Row):
    """`latency_prompts.csv`: one row per prompt and arm."""

    kind = "latency_prompts"
    recognised_by = ("prompt_index", "prompt", "completion", "time_to_first_token_ms")

    prompt_index: MaybeInt = figure(
        "number that with the seed determines the random numbers: the place of the prompt; later turns of"
        " conversations and repetitions follow the set"
    )
    prompt_place: MaybeInt = figure(
        "place of the prompt in the prompt set, from 0: the same for every turn and repetition"
    )
    asked_before: MaybeInt = figure("how often the run had asked it before")
    category: MaybeText = figure("category of the prompt, where the set has them")
    turn: MaybeInt = figure(
        "turn of a conversation, from 1; empty where only first turns are asked"
    )
    prompt: MaybeText = figure("the prompt; the user's last message of a chat")
    arm: MaybeText = figure("`regular` or `speculative`")
    completion: MaybeText = figure("generated text")
    num_tokens: MaybeInt = figure("generated tokens", "tokens")
    time_ms: MaybeFloat = figure("time of the prompt's batch, or of its request to a server", "ms")
    time_to_first_token_ms: MaybeFloat = figure("time to the first token", "ms")
    cached_tokens: MaybeInt = figure(
        "tokens of the prompt that the server took from a cache, as it says", "tokens"
    )
    unit: MaybeInt = figure("number of the batch or lap that it was part of, from 0")
    joules: MaybeFloat = figure("energy of the GPUs during its batch or lap, by NVML", "J")
    gpu_throttled: MaybeText = figure("why clocks of a GPU were lowered at its end, by NVML")
    error: MaybeText = figure("why the request failed")
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    conditional_acceptance_rate: MaybeFloat = figure("accepted / tested draft tokens")
    mean_acceptance_length: MaybeFloat = figure(
        "tokens per iteration that proposed something", "tokens"
    )
    mean_proposed: MaybeFloat = figure("draft tokens per such iteration", "tokens")
    num_iterations: MaybeInt = figure("iterations, also those that proposed nothing")
    tokens_per_iteration: MaybeFloat = figure("tokens per iteration, over all of them", "tokens")
    acceptance_by_position: list[float | None] | None = figure(
        "accepted / tested at each draft position, as JSON"
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    divergence_position: MaybeInt = figure(
        "first token at which a greedy text differs from the regular arm's"
    )
    logit_margin: MaybeFloat = figure(
        "logit of the regular arm's token minus that of this arm's, at that place"
    )

    @property
    def is_timed(self) -> bool:
        """Whether it was answered, and how long that took is known. A damaged file may hold any number."""
        has_time = 0 < (self.time_ms or 0) < _MOST_MS
        return has_time and (self.num_tokens or 0) > 0 and not self.error

    @property
    def ms_per_token(self) -> float:
        return (self.time_ms or 0.0) / (self.num_tokens or 1)


def read_prompts(directory: Path | None, run: str | None) -> list[LatencyPromptRow]:
    """What a run wrote about its prompts, from its directory; [] where that is gone."""
    if directory is None:
        return []
    rows = rows_in(directory / PROMPTS_FILE, LatencyPromptRow)
    return [row for row in rows if row.run == run]
