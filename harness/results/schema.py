"""Every kind of row that is written, described once: a dataclass per CSV file, a field per column.

Writing, parsing, empty cells, `docs/columns.md`, and the settings in which rows differ all follow from here. A value
that cannot be had is None and an empty cell. All rows that one run wrote have the same `run`: readers group by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from harness.results.row import Row, circumstance, figure, setting

# A value that cannot be had is None.
MaybeText = str | None
MaybeInt = int | None
MaybeFloat = float | None
MaybeBool = bool | None

# The status of a job that a sweep did not measure, see `sweep/saturation.py`.
LEFT_OUT = "left_out"

# Settings and circumstances of a pair that decodes here. A server has its own, which it does not
# tell.
OF_A_PAIR_HERE = (
    "num_draft_tokens",
    "weights",
    "weights_identity",
    "quantization",
    "draft_repository",
    "draft_weights_identity",
    "draft_quantization",
    "draft_method",
    "draft_sampling",
    "draft_tree",
    "draft_budget",
    "draft_layers",
    "max_ngram",
    "shared",
    "placement",
    "rule",
    "lenience",
    "lossy",
    "num_threads",
    "torch_version",
    "transformers_version",
    "bitsandbytes_version",
)


@dataclass(frozen=True, kw_only=True)
class RunRow(Row):
    """A row with a run's result. A run that failed has one as well, with the reason."""

    job: MaybeText = circumstance(
        "number of the job within its sweep, from 0; empty outside a sweep's own file"
    )
    status: MaybeText = circumstance(
        "`ok`, `failed` or `interrupted`; of a plan also `does_not_fit`, of a sweep's job also `left_out`"
    )
    error: MaybeText = circumstance("why the status is not `ok`")
    model: MaybeText = setting("name of the target, as typed", "model.name")
    draft: MaybeText = setting(
        "name of the draft, as typed; empty without one, and with a server a label", "draft.name"
    )
    batch_size: MaybeInt = setting("rows decoded at once", "batch_size")
    num_draft_tokens: int | Literal["auto"] | None = setting(
        "K, draft tokens per iteration, or `auto`", "decoding.num_draft_tokens", "tokens"
    )
    max_new_tokens: MaybeInt = setting(
        "new tokens per prompt, at most", "decoding.max_new_tokens", "tokens"
    )
    weights: MaybeText = setting(
        "`stored`, or `random` where only the architecture is real", "weights"
    )
    repository: MaybeText = setting("directory or hub repository of the target", "model.repository")
    draft_repository: MaybeText = setting(
        "directory or hub repository of the draft", "draft.repository"
    )
    quantization: MaybeText = setting(
        "quantization of the target: `none`, `8bit` or `4bit`", "model.quantization"
    )
    draft_quantization: MaybeText = setting("quantization of the draft", "draft.quantization")
    draft_method: MaybeText = setting(
        "`model` for a model or a head, else the method's name", "draft.method"
    )
    draft_sampling: MaybeText = setting(
        "how draft tokens are drawn: `target` or `greedy`", "draft.sampling"
    )
    draft_tree: MaybeText = setting(
        "whether proposals are a `chain`, or trees: `static`, `dynamic` or `sequences`",
        "draft.tree",
    )
    draft_budget: MaybeInt = setting(
        "draft tokens of a tree, at most; its depth is `num_draft_tokens`. Not of a chain",
        "draft.budget",
        "tokens",
    )
    draft_layers: list[int] | None = setting(
        "how many layers `early_exit` has, or those a head reads", "draft.layers"
    )
    max_ngram: MaybeInt = setting(
        "longest sequence that `lookup` searches for", "draft.max_ngram", "tokens"
    )
    shared: MaybeBool = setting(
        "whether `suffix` searches earlier answers of the run", "draft.shared"
    )
    placement: MaybeText = setting("strategy by which the target was placed", "strategy")
    chat_template: MaybeText = setting(
        "whether prompts went through the chat template", "chat_template"
    )
    settings: dict[str, Any] | None = setting(
        "settings that differ from their defaults and have no column, as JSON"
    )
    weights_identity: MaybeText = circumstance(
        "`commit:` and the hub's commit that the target was loaded from, or `files:` and a digest of"
        " names, sizes and sampled contents of its files"
    )
    draft_weights_identity: MaybeText = circumstance("the same for the draft")
    dtype: MaybeText = circumstance("number format of what is not quantized in the target")
    draft_dtype: MaybeText = circumstance("number format of what is not quantized in the draft")
    weight_bytes: dict[str, int] | None = circumstance(
        "the target's weights, bytes by device, as JSON", "bytes"
    )
    draft_weight_bytes: dict[str, int] | None = circumstance(
        "the draft's weights, bytes by device, as JSON", "bytes"
    )
    engine: MaybeText = setting(
        "who generated: `local`, `huggingface`, `vllm`, `server`, or another engine by its name",
        "engine.name",
    )
    url: MaybeText = setting(
        "address of the server, of the one that speculates if there are two", "engine.url"
    )
    regular_url: MaybeText = setting(
        "address of the server that does not speculate", "engine.regular_url"
    )
    request_rate: MaybeFloat = setting(
        "requests sent per second; empty for `batch_size` in flight", "engine.rate"
    )
    server: MaybeText = circumstance(
        "name and version of the server, as it says; of both, where the arms' differ"
    )
    server_started: MaybeText = circumstance(
        "when the server was started, as it says, in its own words; of both, where there are two"
    )
    schedule: MaybeText = setting(
        "schedule of Hugging Face's number of draft tokens", "engine.schedule"
    )
    translation: MaybeText = circumstance(
        "`intersection` or `text`, for a draft that has another tokenizer"
    )
    runner: MaybeText = circumstance(
        "what ran the models; `eager+graphs` where target and draft differ"
    )
    setup_s: MaybeFloat = circumstance("time to compile and capture", "s")
    timestamp: MaybeText = circumstance("when the row was written, UTC")
    devices: MaybeText = circumstance("names of the devices that computed")
    num_threads: MaybeInt = circumstance("threads that computed on the CPU")
    harness_version: MaybeText = circumstance("version of harness")
    commit: MaybeText = circumstance("commit of harness; `-dirty` with uncommitted changes")
    torch_version: MaybeText = circumstance("version of torch; empty where a server computed")
    transformers_version: MaybeText = circumstance("version of transformers, likewise")
    bitsandbytes_version: MaybeText = circumstance("version of bitsandbytes, likewise")
    measurement: MaybeText = circumstance(
        "digest of everything that determines the figures; equal for repetitions"
    )
    directory: MaybeText = circumstance("directory of the run")

    # The columns of which one has a value where anything was measured, even in part; () for all of its figures.
    RESULTS: ClassVar[tuple[str, ...]] = ()

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured, even in part."""
        columns = self.columns()
        figures = self.RESULTS or [name for name in columns if columns[name].kind == "figure"]
        return any(getattr(self, name) is not None for name in figures)

    @property
    def synthetic(self) -> bool:
        """Whether a coin accepted the draft tokens, in place of the rule."""
        return bool(self.draft) and getattr(self, "synthetic_acceptance", None) is not None

    @property
    def real(self) -> bool:
        """Whether the figures are those of the models that the row names."""
        return self.weights != "random" and not self.synthetic


@dataclass(frozen=True, kw_only=True)
class DecodedRow(RunRow):
    """A row of a command that decodes."""

    temperature: MaybeFloat = setting("temperature; 0 is greedy", "decoding.temperature")
    top_k: MaybeInt = setting("the k likeliest tokens are kept; 0 keeps all", "decoding.top_k")
    top_p: MaybeFloat = setting(
        "the likeliest tokens up to this mass are kept; 1 keeps all", "decoding.top_p"
    )
    rule: MaybeText = setting("acceptance rule", "decoding.rule")
    lenience: MaybeFloat = setting(
        "lenience of the acceptance rule; below 1 is lossy", "decoding.lenience"
    )
    synthetic_acceptance: float | list[float] | None = setting(
        "probability with which a coin accepted draft tokens; a list has one for each position, a number above 1 is"
        " a mean length; empty for the rule",
        "decoding.synthetic_acceptance",
    )
    lossy: MaybeBool = setting(
        "whether the speculative output may differ from the target's", "decoding.lossy"
    )
    ignore_eos: MaybeBool = setting(
        "whether texts went on past the end of sequence", "decoding.ignore_eos"
    )
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    conditional_acceptance_rate: MaybeFloat = figure(
        "accepted / tested draft tokens (alpha of Leviathan et al.)"
    )
    mean_acceptance_length: MaybeFloat = figure(
        "tokens per iteration that proposed something: 1 + accepted / such iterations", "tokens"
    )


@dataclass(frozen=True, kw_only=True)
class PromptedRow(DecodedRow):
    """A row of a command that decodes the prompts of a set."""

    prompts: MaybeText = setting("name of the prompt set", "prompts.name")
    prompts_file: MaybeText = setting("file of the prompt set", "prompts.file")
    too_long: MaybeText = setting(
        "what became of prompts longer than the context", "prompts.too_long"
    )
    num_skipped: MaybeInt = figure("prompts left out because they are too long")
    num_truncated: MaybeInt = figure(
        "prompts of which only the last tokens were read, because they are too long"
    )
    prompts_digest: MaybeText = circumstance("digest of the prompt set's texts")


@dataclass(frozen=True, kw_only=True)
class LatencyRow(PromptedRow):
    """`latency.csv`: one row per arm."""

    kind = "latency"
    RESULTS = ("ms_per_token",)
    signature = ("arm", "ms_per_token", "speedup", "tokens_per_second")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = figure("`regular` or `speculative`")
    num_prompts: MaybeInt = figure("prompts measured; every turn of a conversation is one")
    num_different_prompts: MaybeInt = figure(
        "different ones among them, where `num_prompts` is above those of the set, which are then asked again"
    )
    salted: MaybeBool = figure(
        "whether repetitions had a salt, so that a server's prefix cache does not answer them;"
        " empty where nothing was repeated, or nothing is cached between questions"
    )
    smallest_batch: MaybeInt = figure(
        "rows of the smallest batch: the last one may not have been full"
    )
    num_tokens: MaybeInt = figure("tokens generated over all prompts", "tokens")
    shortest_answer: MaybeInt = figure("tokens of the shortest answer", "tokens")
    longest_answer: MaybeInt = figure("tokens of the longest answer", "tokens")
    ms_per_token: MaybeFloat = figure(
        "time per token of a row, with the prompt's pass; mean over batches", "ms"
    )
    ms_per_token_median: MaybeFloat = figure("median of the same", "ms")
    ms_per_token_std: MaybeFloat = figure(
        "standard deviation of the same, over prompts or batches", "ms"
    )
    tokens_per_second: MaybeFloat = figure("tokens of all rows over total time", "tokens/s")
    tokens_per_second_low: MaybeFloat = figure(
        "lower end of its 95 % interval over prompts, batches or laps", "tokens/s"
    )
    tokens_per_second_high: MaybeFloat = figure("upper end of the same", "tokens/s")
    tokens_per_second_per_user: MaybeFloat = figure(
        "1000 / `ms_per_token`: what a row's reader gets", "tokens/s"
    )
    tokens_per_second_per_user_low: MaybeFloat = figure(
        "lower end of its 95 % interval over prompts, batches or laps", "tokens/s"
    )
    tokens_per_second_per_user_high: MaybeFloat = figure("upper end of the same", "tokens/s")
    time_to_first_token_ms: MaybeFloat = figure("mean time to the first token", "ms")
    time_to_first_token_p50_ms: MaybeFloat = figure(
        "median of the same, over requests to a server", "ms"
    )
    time_to_first_token_p90_ms: MaybeFloat = figure("90th percentile of the same", "ms")
    time_to_first_token_p95_ms: MaybeFloat = figure("95th percentile of the same", "ms")
    time_to_first_token_p99_ms: MaybeFloat = figure("99th percentile of the same", "ms")
    time_per_output_token_p50_ms: MaybeFloat = figure(
        "median over requests of the mean time per token after the first"
        " (TPOT of vLLM, inter-token latency of AIPerf)",
        "ms",
    )
    time_per_output_token_p90_ms: MaybeFloat = figure("90th percentile of the same", "ms")
    time_per_output_token_p95_ms: MaybeFloat = figure("95th percentile of the same", "ms")
    time_per_output_token_p99_ms: MaybeFloat = figure("99th percentile of the same", "ms")
    inter_token_latency_p50_ms: MaybeFloat = figure(
        "median time between two arrivals of a request, each of one or more tokens (ITL of vLLM);"
        " tokens that come within a tenth of its mean time per token are one arrival",
        "ms",
    )
    inter_token_latency_p90_ms: MaybeFloat = figure("90th percentile of the same", "ms")
    inter_token_latency_p95_ms: MaybeFloat = figure("95th percentile of the same", "ms")
    inter_token_latency_p99_ms: MaybeFloat = figure("99th percentile of the same", "ms")
    tokens_per_arrival: MaybeFloat = figure(
        "tokens that arrived together, on average: above 1 the server sends bursts", "tokens"
    )
    requests_per_second: MaybeFloat = figure(
        "requests that were answered, over total time", "requests/s"
    )
    slo: dict[str, float] | None = setting(
        "most milliseconds to the first token (`ttft_ms`) and per token after it (`itl_ms`), as JSON",
        "engine.slo",
        "ms",
    )
    goodput: MaybeFloat = figure("requests per second within `slo`", "requests/s")
    goodput_share: MaybeFloat = figure("share of the requests within `slo`")
    goodput_ratio: MaybeFloat = figure("`goodput` over the regular arm's")
    goodput_ratio_low: MaybeFloat = figure("lower end of its paired 95 % interval over laps")
    goodput_ratio_high: MaybeFloat = figure("upper end of the same")
    server_tokens: MaybeInt = figure(
        "new tokens that the server counted while the arm was measured, by its metrics", "tokens"
    )
    foreign_tokens: MaybeInt = figure(
        "those of them that were not ours; 0 within a token a request and 1 %", "tokens"
    )
    num_preemptions: MaybeInt = figure(
        "how often the server took the cache of a running request for others, by its metrics"
    )
    acceptance_source: MaybeText = figure(
        "`metrics` where acceptance is that of the server's counters, because its answers tell none"
    )
    num_failed: MaybeInt = figure(
        "requests that failed, time-outs too; the other figures leave them out"
    )
    num_timed_out: MaybeInt = figure("requests that took longer than `engine.timeout_s`")
    num_sent_again: MaybeInt = figure(
        "requests sent a second time: the server had closed a kept-alive connection"
    )
    cached_tokens: MaybeInt = figure(
        "tokens of prompts that the server took from a cache, as it says", "tokens"
    )
    num_prompt_tokens: MaybeInt = figure("tokens of all prompts", "tokens")
    speedup: MaybeFloat = figure(
        "`ms_per_token` of the regular arm over that of this one, on prompts that both answered; with as many tokens"
        " in each answer the ratio of total times"
    )
    speedup_low: MaybeFloat = figure("lower end of its 95 % paired interval")
    speedup_high: MaybeFloat = figure("upper end of the same")
    speedup_covers: MaybeText = figure(
        "what the interval is over: prompts, batches, or laps of requests in flight together"
    )
    decode_speedup: MaybeFloat = figure(
        "the same without the time until the first tokens: the longer the answers, the closer is `speedup` to it"
    )
    decode_speedup_low: MaybeFloat = figure("lower end of its 95 % paired interval")
    decode_speedup_high: MaybeFloat = figure("upper end of the same")
    visible_difference: MaybeFloat = figure(
        "a difference between the arms of this share is found four times in five; smaller ones less often"
    )
    units_for_half: MaybeInt = figure(
        "prompts, batches or laps that would show half of it, with as many runs; empty where none would"
    )
    drift: MaybeFloat = figure("speed-up in the second half of the run over that in the first")
    drift_low: MaybeFloat = figure("lower end of its 95 % interval")
    drift_high: MaybeFloat = figure("upper end of the same")
    drifted: MaybeBool = figure("whether that is significant and above 2 %")
    processor_share: MaybeFloat = figure(
        "share of the processor time that the process asked for and got while it measured"
    )
    load: MaybeFloat = figure("load average over the last minute, at the end")
    num_cores: MaybeInt = figure("cores that the process may use")
    other_gpu_processes: MaybeInt = figure("most other processes on these GPUs at once, by NVML")
    lowest_gpu_clock_mhz: MaybeInt = figure("lowest clock of a GPU's cores, by NVML", "MHz")
    gpu_throttled: MaybeText = figure("why clocks of a GPU were lowered meanwhile, by NVML")
    num_units: MaybeInt = figure("prompts, batches or laps during which GPUs were watched")
    num_throttled_units: MaybeInt = figure("those of them at whose end clocks were lowered")
    joules_per_token: MaybeFloat = figure(
        "energy of the GPUs per token, by NVML; what they take when idle included", "J"
    )
    energy_ratio: MaybeFloat = figure("regular / speculative energy per token, totals over units")
    energy_ratio_low: MaybeFloat = figure("lower end of its 95 % paired interval")
    energy_ratio_high: MaybeFloat = figure("upper end of the same")
    reproducible: MaybeBool = figure(
        "`False` where the same settings give other texts: K of `auto` follows measured times"
    )
    interleaved: MaybeBool = figure(
        "whether the arms took turns; `False` where drift of the machine is not excluded"
    )
    aa_ratio: MaybeFloat = figure(
        "`speedup` of the regular arm over itself, measured before with `engine.aa=true`"
    )
    aa_ratio_low: MaybeFloat = figure("lower end of its 95 % paired interval")
    aa_ratio_high: MaybeFloat = figure("upper end of the same")
    predicted_speedup: MaybeFloat = figure(
        "tokens per iteration / (K c + v), with measured c and v"
    )
    acceptance_by_position: list[float | None] | None = figure(
        "accepted / tested at each draft position (conditional), as JSON"
    )
    marginal_acceptance_by_position: list[float | None] | None = figure(
        "accepted / iterations at each draft position (marginal), as vLLM and llama.cpp print it, as JSON"
    )
    mean_acceptance_length_per_request: MaybeFloat = figure(
        "mean over requests of their mean acceptance lengths; `mean_acceptance_length` pools iterations",
        "tokens",
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    acceptance_by_rank: list[float] | None = figure(
        "of trees: how often the first, second, ... child of a node was accepted, of the nodes that were reached and"
        " have such a child, as JSON"
    )
    acceptance_length_by_num_draft_tokens: list[float] | None = figure(
        "mean acceptance length if iterations had proposed at most 1, 2, ... of their tokens, as JSON",
        "tokens",
    )
    acceptance_length_by_num_draft_tokens_low: list[float] | None = figure(
        "lower ends of their 95 % intervals over prompts, as JSON", "tokens"
    )
    acceptance_length_by_num_draft_tokens_high: list[float] | None = figure(
        "upper ends of the same", "tokens"
    )
    share_after_end: MaybeFloat = figure(
        "share of the tokens that came after the end of their text, with `ignore_eos`"
    )
    acceptance_rate_before_end: MaybeFloat = figure(
        "`acceptance_rate` of iterations that began before the end of the text"
    )
    acceptance_rate_after_end: MaybeFloat = figure("the same after it")
    mean_proposed: MaybeFloat = figure("draft tokens per iteration", "tokens")
    mean_num_draft_tokens: MaybeFloat = figure(
        "the same over all iterations: K of `auto`", "tokens"
    )
    tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration, over all iterations: 1 + accepted / iterations", "tokens"
    )
    greedy_acceptance_rate: MaybeFloat = figure(
        "accepted / tested at temperature 0, asked of other engines where acceptance is low"
    )
    likeliest_share: MaybeFloat = figure(
        "share of the target's draws that are its likeliest token, likewise"
    )
    suspicious: MaybeBool = figure(
        "whether acceptance is so far below both that the engine looks wrong, likewise"
    )
    draft_ms: MaybeFloat = figure("drafting per iteration", "ms")
    verify_ms: MaybeFloat = figure(
        "verification per iteration: the target's pass over K + 1 tokens, and the verdict", "ms"
    )
    pass_ms_by_width: list[float | None] | None = figure(
        "a pass of the target over 1, 2, ... tokens, as JSON; null for widths that were not measured",
        "ms",
    )
    target_step_ms: MaybeFloat = figure(
        "one forward pass of the target over one token, and the draw of the next", "ms"
    )
    target_8bit_share: MaybeFloat = figure(
        "of a step of the target, spent in its 8-bit linear layers"
    )
    draft_8bit_share: MaybeFloat = figure("of drafting, spent in the draft's 8-bit linear layers")
    iteration_ms: MaybeFloat = figure("a whole iteration in the timed run", "ms")
    identical_prompts: MaybeInt = figure("greedy texts equal to the regular arm's")
    peak_memory_bytes: MaybeInt = figure(
        "most GPU memory allocated or held by CUDA graphs, summed over GPUs", "bytes"
    )
    num_experts: MaybeInt = figure("experts in a layer of the target; empty for a dense model")
    experts_per_step: MaybeFloat = figure(
        "different experts of a layer that a regular step reads, all rows together"
    )
    experts_per_verification: MaybeFloat = figure(
        "different experts of a layer that a verification reads, all rows together"
    )
    step_bytes: MaybeInt = figure("weights and cache that a step of the target reads", "bytes")
    draft_step_bytes: MaybeInt = figure("weights and cache that a step of the draft reads", "bytes")
    copy_bandwidth_bytes_per_s: MaybeFloat = figure(
        "measured rate of a large copy in the target's memory", "bytes/s"
    )
    floor_ms: MaybeFloat = figure("least time of a target step at that rate", "ms")
    draft_floor_ms: MaybeFloat = figure("least time of a draft step", "ms")
    repeats: MaybeInt = setting(
        "how many runs were asked for; of a pooled row, were pooled", "repeats"
    )
    repeat: int | Literal["all"] | None = setting(
        "number of the run among its repetitions; `all` for the row that pools them, with means",
        "repeat",
    )
    pooled_runs: list[str] | None = figure("`run` of those that a row pools, as JSON")
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


@dataclass(frozen=True, kw_only=True)
class DistillRow(LatencyRow):
    """`distill.csv`: one row per arm before the training, and one per arm after it."""

    kind = "distill"
    signature = ("stage", "num_learned_tokens", "loss", "epochs")

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


@dataclass(frozen=True, kw_only=True)
class LatencyPromptRow(Row):
    """`latency_prompts.csv`: one row per prompt and arm."""

    kind = "latency_prompts"
    signature = ("prompt_index", "prompt", "completion", "time_to_first_token_ms")

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
        """Whether it was answered, and how long that took is known."""
        return bool(self.time_ms and self.num_tokens and not self.error)

    @property
    def ms_per_token(self) -> float:
        return (self.time_ms or 0.0) / (self.num_tokens or 1)


@dataclass(frozen=True, kw_only=True)
class EvalRow(DecodedRow):
    """`eval.csv`: one row per seed and arm, then one per arm with `seed=all`."""

    kind = "eval"
    RESULTS = ("accuracy",)
    signature = ("arm", "accuracy", "wald_low", "mcnemar_p_value")

    seed: MaybeText = setting(
        "seed of the questions and of sampling; `all` for several seeds merged"
    )
    arm: MaybeText = figure("`regular` or `speculative`")
    num_prompts: MaybeInt = figure("questions answered")
    smallest_batch: MaybeInt = figure(
        "rows of the smallest batch of this run: the last of a seed may not be full"
    )
    accuracy: MaybeFloat = figure("proportion of correct answers")
    wald_low: MaybeFloat = figure("lower end of Wald's 95 % interval")
    wald_high: MaybeFloat = figure("upper end of Wald's 95 % interval")
    wilson_low: MaybeFloat = figure("lower end of Wilson's 95 % interval")
    wilson_high: MaybeFloat = figure("upper end of Wilson's 95 % interval")
    num_correct: MaybeInt = figure("correct answers")
    num_parsed: MaybeInt = figure("completions with an answer")
    difference: MaybeFloat = figure(
        "accuracy of this arm minus the regular arm's, on the same questions"
    )
    difference_low: MaybeFloat = figure("lower end of Newcombe's paired 95 % interval")
    difference_high: MaybeFloat = figure("upper end of the same")
    mcnemar_p_value: MaybeFloat = figure("exact two-sided p-value of McNemar's test")
    identical_prompts: MaybeInt = figure("greedy completions equal to the regular arm's")
    published_accuracy: MaybeFloat = figure("accuracy that others published for this model and arm")
    ms_per_answer: MaybeFloat = figure(
        "mean time per answer; an answer takes an equal share of its batch", "ms"
    )
    num_tokens: MaybeInt = figure("tokens generated over all questions", "tokens")
    num_resumed: MaybeInt = figure("answers taken from earlier runs")
    task: MaybeText = setting("name of the task", "task")
    operands: MaybeText = setting("lowest and highest operand, `1-99`; empty for other tasks")
    metric: MaybeText = figure(
        "metric of lm-evaluation-harness that scored the answers and its filter,"
        " `exact_match, strict-match`; empty for other tasks"
    )
    prompts_digest: MaybeText = circumstance("digest of the questions")


@dataclass(frozen=True, kw_only=True)
class AnswerRow(Row):
    """`eval_prompts.csv` and the store of answers: one row per question and arm."""

    kind = "eval_prompts"
    signature = ("prompt_index", "expected", "correct", "outcomes")

    prompt_index: int = figure("index of the question within its seed, from 0")
    seed: int = figure("seed of the question")
    arm: str = figure("`regular` or `speculative`")
    a: MaybeInt = figure("first operand; empty for a question from a data set")
    b: MaybeInt = figure("second operand, likewise")
    source_row: MaybeInt = figure("row of the question in its data set, from 0")
    expected: str = figure("correct answer")
    completion: str = figure("generated text up to the end of the line, or to the next question")
    answer: MaybeText = figure("answer read from it; empty where there is none")
    correct: bool = figure("whether it is the expected one")
    num_tokens: int = figure("generated tokens", "tokens")
    time_ms: float = figure("time of the question's batch over the questions in it", "ms")
    outcomes: list[list[int]] = figure("[proposed, accepted] of each iteration, as JSON")
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    answered_at: str = figure("when it was answered, UTC")
    server_started: MaybeText = circumstance("when the server was started, as it says")

    @property
    def key(self) -> tuple[str, int, int]:
        """Arm, seed and index of the question: once in every run."""
        return self.arm, self.seed, self.prompt_index


@dataclass(frozen=True, kw_only=True)
class RecoveryRow(PromptedRow):
    """`recovery.csv`: one row per check."""

    kind = "recovery"
    RESULTS = ("verdict",)
    signature = ("check", "verdict", "p_value", "significance_level")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    arm: MaybeText = figure("the arm under test")
    load: MaybeInt = setting("requests in flight; empty for one question after the other", "load")
    check: MaybeText = figure("`greedy` or `sampled`")
    sampling: MaybeText = figure(
        "under load: the sampling setting, and which tokens; empty for all together"
    )
    verdict: MaybeText = figure("`lossless`, `lossy` or `undecided`")
    prompt_index: MaybeInt = figure(
        "prompt that the draws continue; empty for all contexts together"
    )
    context_end: MaybeInt = figure("how many of the prompt's tokens the draws continue", "tokens")
    num_prompts: MaybeInt = figure("prompts compared, or contexts drawn from")
    num_tokens: MaybeInt = figure(
        "greedy: tokens compared; sampled: tokens counted per draw", "tokens"
    )
    identical_prompts: MaybeInt = figure("greedy texts equal to the regular arm's")
    divergence_position: MaybeInt = figure("where the greedy texts differ most: token")
    logit_margin: MaybeFloat = figure("logit margin there")
    logit_tolerance: MaybeFloat = figure(
        "largest margin there that rounding explains, as measured there"
    )
    num_draws: MaybeInt = figure("sampled continuations; under load sampled tokens")
    statistic: MaybeFloat = figure("chi-square statistic")
    degrees_of_freedom: MaybeInt = figure(
        "degrees of freedom of the test; with 0 nothing was tested"
    )
    p_value: MaybeFloat = figure("p-value of the test; empty where nothing was tested")
    significance_level: MaybeFloat = figure("a p-value below this is called lossy")
    power: MaybeFloat = figure("chance that the test sees the stated shift")
    num_draws_needed: MaybeInt = figure("of an undecided check: a `num_draws` that would be enough")
    refused: MaybeText = figure(
        "under load: sampling settings that the engine refused, which were not tested"
    )
    rounding: MaybeFloat = figure("part of the statistic attributed to rounding")
    shift: MaybeFloat = setting(
        "total variation of a token's distribution that must be seen", "shift"
    )
    false_alarm_rate: MaybeFloat = setting(
        "chance that a lossless pair is called lossy", "false_alarm_rate"
    )
    fault: MaybeText = setting("mistake planted on purpose, or `none`", "fault")


@dataclass(frozen=True, kw_only=True)
class CompareRow(DecodedRow):
    """`compare.csv`: one row per prompt that was typed."""

    kind = "compare"
    RESULTS = ("regular_ms_per_token",)
    signature = ("prompt", "num_rejections", "regular_ms_per_token", "speculative_ms_per_token")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    prompt_index: MaybeInt = figure("number of the prompt within the session, from 0")
    prompt: MaybeText = figure("the prompt")
    num_prompt_tokens: MaybeInt = figure("its tokens", "tokens")
    speedup: MaybeFloat = figure("regular / speculative time per token")
    num_compared: MaybeInt = figure(
        "tokens at the beginning of both texts whose times the speed-up compares, where lengths"
        " differ",
        "tokens",
    )
    acceptance_histogram: list[int] | None = figure(
        "iterations with 0, 1, ... accepted draft tokens, as JSON"
    )
    tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration, also of those that proposed nothing", "tokens"
    )
    num_rejections: MaybeInt = figure("draft tokens that the target rejected")
    identical: MaybeBool = figure("whether both texts are the same tokens")
    parted_at: MaybeInt = figure("first token at which they differ")
    logit_margin: MaybeFloat = figure("greedy: logit margin there")
    regular_completion: MaybeText = figure("text of the regular arm")
    regular_num_tokens: MaybeInt = figure("its tokens", "tokens")
    regular_time_ms: MaybeFloat = figure("its time", "ms")
    regular_ms_per_token: MaybeFloat = figure("its time per token", "ms")
    regular_tokens_per_second: MaybeFloat = figure("its rate", "tokens/s")
    regular_time_to_first_token_ms: MaybeFloat = figure("its time to the first token", "ms")
    speculative_completion: MaybeText = figure("text of the speculative arm")
    speculative_num_tokens: MaybeInt = figure("its tokens", "tokens")
    speculative_time_ms: MaybeFloat = figure("its time", "ms")
    speculative_ms_per_token: MaybeFloat = figure("its time per token", "ms")
    speculative_tokens_per_second: MaybeFloat = figure("its rate", "tokens/s")
    speculative_time_to_first_token_ms: MaybeFloat = figure("its time to the first token", "ms")
    view: MaybeText = setting("how it was shown", "view")


@dataclass(frozen=True, kw_only=True)
class PlanRow(RunRow):
    """`plan.csv`: one row per pair."""

    kind = "plan"
    signature = ("needed_bytes", "free_bytes", "highest_speedup", "instead")

    prompt_length: MaybeInt = setting("tokens of the longest prompt", "prompt_length", "tokens")
    num_gpus: MaybeInt = figure("GPUs that were planned for; 0 is main memory")
    free_bytes: MaybeInt = figure("free memory of the GPU that has least", "bytes")
    reserve_bytes: MaybeInt = figure("kept free on each GPU", "bytes")
    num_tokens: MaybeInt = figure(
        "tokens of a row: prompt, new tokens and what is drafted beyond", "tokens"
    )
    num_parameters: MaybeInt = figure("parameters of the target")
    draft_num_parameters: MaybeInt = figure("parameters of the draft")
    model_bytes: MaybeInt = figure("weights of the target", "bytes")
    draft_bytes: MaybeInt = figure("weights of the draft; 0 where it shares the target's", "bytes")
    cache_bytes: MaybeInt = figure("KV cache of the target", "bytes")
    draft_cache_bytes: MaybeInt = figure("KV cache of the draft", "bytes")
    needed_bytes: MaybeInt = figure("weights and caches of both", "bytes")
    rule_of_thumb_bytes: MaybeInt = figure(
        "llama-ssp's rule: 4 bytes per parameter, 2 if quantized", "bytes"
    )
    draft_rule_of_thumb_bytes: MaybeInt = figure("the same for the draft", "bytes")
    read_bytes: MaybeInt = figure(
        "what one forward pass of the target must read; on each GPU with tensor_parallel", "bytes"
    )
    speculative_read_bytes: MaybeInt = figure(
        "the same per token with the draft, all tokens accepted", "bytes"
    )
    verification_steps: MaybeFloat = figure(
        "what a verification reads over what a step reads: above 1 where its tokens take different"
        " experts"
    )
    highest_speedup: MaybeFloat = figure(
        "speed-up if every draft token is accepted and verification takes as long as its reading"
    )
    break_even_tokens: MaybeFloat = figure(
        "tokens per iteration from which on speculation pays", "tokens"
    )
    bandwidths: dict[str, float] | None = figure(
        "memory bandwidth by what has it, GB/s, as JSON", "GB/s"
    )
    lowest_ms_per_token: MaybeFloat = figure(
        "least time per token at that bandwidth, if there is one", "ms"
    )
    lowest_speculative_ms_per_token: MaybeFloat = figure("the same with the draft", "ms")
    devices_bytes: dict[str, dict[str, int]] | None = figure(
        "free memory and its use by device, as JSON", "bytes"
    )
    device_map: dict[str, Any] | None = figure("modules of the target to devices, as JSON")
    draft_device_map: dict[str, Any] | None = figure("modules of the draft to devices, as JSON")
    instead: MaybeText = figure("changes that would make the pair fit, one per line")
    note: MaybeText = figure("what else matters")


@dataclass(frozen=True, kw_only=True)
class MapRow(DecodedRow):
    """`map.csv`: one row per cell of the grid."""

    kind = "map"
    RESULTS = ("speedup",)
    signature = ("context", "measured", "speedup")

    seed: MaybeInt = setting("seed of the random numbers", "seed")
    context: MaybeInt = figure("mean length of the prompts", "tokens")
    measured: MaybeBool = figure("whether the cell was measured; `False` if it is interpolated")
    speedup: MaybeFloat = figure("regular / speculative time per token, totals over prompts")
    speedup_low: MaybeFloat = figure(
        "lower end of its 95 % paired interval; of cells that were not measured, interpolated"
    )
    speedup_high: MaybeFloat = figure("upper end of the same")
    speedup_covers: MaybeText = figure("what the interval is over: `8 prompts`, `4 batches`")
    regular_ms_per_token: MaybeFloat = figure("time per token of the regular arm", "ms")
    speculative_ms_per_token: MaybeFloat = figure("the same of the speculative arm", "ms")
    prompts: MaybeText = setting("name of the prompt set", "prompts.name")


# The kinds that this project writes; a command from elsewhere brings its own.
KINDS: list[type[Row]] = [
    LatencyRow,
    EvalRow,
    RecoveryRow,
    CompareRow,
    DistillRow,
    PlanRow,
    MapRow,
    LatencyPromptRow,
    AnswerRow,
]


def kind_of(header: Iterable[str], kinds: Iterable[type[Row]] = KINDS) -> type[Row] | None:
    """The kind of the rows in a file with these columns; None for a file of none of these kinds."""
    columns = set(header)
    fitting = [kind for kind in kinds if columns.issuperset(("run", *kind.signature))]
    # Some add columns to others.
    return max(fitting, key=lambda kind: len(kind.columns()), default=None)
