"""The settings of each command. As in `settings.py`, they cannot hold a wrong value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from harness.config.engines import Abilities
from harness.config.machine import is_loopback
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import require, require_at_least, require_possible_path

View = Literal["text", "race", "log"]
Task = Literal["multiplication", "addition"]
Fault = Literal[
    "none",
    "residual_warped_twice",
    "bonus_from_wrong_position",
    "rollback_off_by_one",
    "draft_probabilities_ignored",
    "lenience",
]


@dataclass(frozen=True, kw_only=True)
class LatencySettings(PromptedSettings):
    """`latency`: regular against speculative decoding on the same prompts.

    Attributes:
        num_prompts: how many prompts of the set are measured.
        num_warmup: batches that every arm decodes first and that are not counted.
        repeats: how often the run is measured, each time in a new process.
        repeat: the number of this one among them, from 1; `repeats` sets it.
        laps: of an engine that keeps requests in flight: how often its arms take turns.
        num_resamples: of the paired bootstrap.
        test: two short prompts, to see that a pair works at all; marked in the row.
        profile: also write a trace of a few iterations of each arm, after the measurement.
    """

    num_prompts: int = 15
    num_warmup: int = 1
    repeats: int = 1
    repeat: int = 1
    laps: int | Literal["auto"] = "auto"
    num_resamples: int = 10_000
    test: bool = False
    profile: bool = False

    COMPARES_TIMES = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_prompts=1, num_warmup=0, num_resamples=100, repeats=1, repeat=1)
        require(self.repeats <= 1000, "repeats", "must be at most 1000", self.repeats)
        if self.laps != "auto":
            require(self.laps >= 1, "laps", "must be auto or at least 1", self.laps)
        # All of them are in memory at once.
        require(
            self.num_resamples <= 10**6, "num_resamples", "must be at most 10^6", self.num_resamples
        )

    def check_engine(self, engine: Abilities) -> None:
        """See `RunSettings.check_engine`."""
        rule = "needs engine=server or engine=vllm"
        require(self.laps == "auto" or engine.may_queue, "laps", rule, self.laps)

    @property
    def pair(self) -> tuple[object, ...]:
        """Each repetition has a process of its own."""
        return *super().pair, self.repeat

    @property
    def seed_of_run(self) -> int:
        """Repetitions of sampled texts draw other ones."""
        sampled = self.decoding.temperature > 0
        return self.seed + self.repeat - 1 if sampled else self.seed


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LatencySettings):
    """`distill`: train a draft model or a head on the target's own answers to a prompt file.

    Attributes:
        num_prompts: the first of the set, on which the draft is measured before and after; the others are learned.
        output: directory for the trained draft, which `draft=` takes; None for one named after the pair in `drafts/`.
        temperatures: of the answers; each prompt is answered once at each.
        answer_tokens: the most tokens of an answer.
        epochs: how often each answer is learned.
        texts_per_step: answers of one batch.
        learning_rate: the highest; it warms up, then falls to a tenth.
        chain: tokens ahead that an EAGLE-3 head is trained to draft.
        save_every: steps after which the state is kept, to go on from after a kill.
    """

    output: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    answer_tokens: int = 128
    epochs: int = 3
    texts_per_step: int = 16
    learning_rate: float = 1e-3
    chain: int = 4
    save_every: int = 100

    TRAINS = True
    # The weights depend on these, beyond the models.
    LEARNED = (
        *(
            "model",
            "draft",
            "prompts",
            "num_prompts",
            "decoding",
            "dtype",
            "seed",
            "chat_template",
            "temperatures",
        ),
        *("answer_tokens", "epochs", "texts_per_step", "learning_rate", "chain"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_possible_path("output", self.directory)
        require_at_least(self, answer_tokens=2, epochs=1, texts_per_step=1, chain=1, save_every=1)
        ends = self.decoding.ignore_eos
        require(ends != "auto", "decoding.ignore_eos", "must be true or false", ends)
        require(self.repeats == 1, "repeats", "must be 1: a draft is trained once", self.repeats)
        require(not self.tensor_parallel, "placement", "must not be tensor_parallel", self.strategy)
        require(
            self.weights == "stored",
            "weights",
            "must be stored: random ones have nothing to teach",
            self.weights,
        )
        require(
            self.draft is not None,
            "draft",
            "must be a model, a head, or eagle3, dflash or medusa",
            "none",
        )
        assert self.draft is not None
        plain = self.draft.quantization == "none" and self.draft.gguf_file is None
        require(plain, "draft", "must not be quantized to be trained", self.draft.name)
        own = self.draft.repository != self.model.repository
        require(own, "draft", "must not be the target itself", self.draft.name)
        require(self.learning_rate > 0, "learning_rate", "must be positive", self.learning_rate)
        hottest, temperatures = max(self.temperatures, default=-1), list(self.temperatures)
        least = min(self.temperatures, default=-1)
        require(
            0 <= least <= hottest,
            "temperatures",
            "must be a list of at least one, none negative",
            temperatures,
        )

    def check_engine(self, engine: Abilities) -> None:
        """See `RunSettings.check_engine`."""
        super().check_engine(engine)
        rule = "must be local: others cannot be trained"
        require(engine.own_loop, "engine", rule, self.engine.name)

    @property
    def pair(self) -> tuple[object, ...]:
        """A trained draft serves no other run."""
        return *super().pair, self.directory

    @property
    def directory(self) -> str:
        """Of the trained draft."""
        names = [model.name for model in (self.model, self.draft) if model is not None]
        return (
            self.output
            or f"drafts/{'-'.join(re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-.') for name in names)}"
        )


@dataclass(frozen=True, kw_only=True)
class CompareSettings(PromptedSettings):
    """`compare`: both arms on prompts that the user types.

    Attributes:
        view: `text` streams one arm after the other; `race` measures both and replays them side by side; `log` also
            lists every rejection.
        prompt: the only prompt; None reads prompts from the terminal, or from a pipe, one per line.
        json: print one JSON record per prompt on stdout, and nothing else.
        prompts: examples in the session's history.
    """

    view: View = "text"
    prompt: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.batch_size == 1,
            "batch_size",
            "must be 1: compare decodes one prompt at a time",
            self.batch_size,
        )
        require(
            self.prompt is None or bool(self.prompt.strip()),
            "prompt",
            "must hold text",
            self.prompt,
        )
        # Stray bytes of a command line become half characters, which no tokenizer takes.
        is_text = not re.search("[\ud800-\udfff]", self.prompt or "")
        require(is_text, "prompt", "must be UTF-8 text", repr(self.prompt))


@dataclass(frozen=True, kw_only=True)
class EvalSettings(RunSettings):
    """`eval`: correct answers of both arms to the same questions.

    Attributes:
        task: a task in `experiments/tasks.py`.
        operands: the lowest and the highest operand of a question.
        seeds: of the questions and of sampling; each seed has its own questions.
        num_prompts: questions per seed.
        resume: also reuse the answers of an earlier run with the same settings.
    """

    task: Task = "multiplication"
    operands: tuple[int, ...] = (1, 99)
    seeds: tuple[int, ...] = (0,)
    num_prompts: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_prompts=1)
        require(self.num_prompts <= 10**6, "num_prompts", "must be at most 10^6", self.num_prompts)
        operands, seeds = list(self.operands), list(self.seeds)
        rule = "must be the lowest and the highest operand, such as [1,99], from 0 to 10^9"
        require(
            len(operands) == 2 and 0 <= operands[0] <= operands[-1] <= 10**9,
            "operands",
            rule,
            operands,
        )
        require(bool(seeds), "seeds", "must name at least one seed", seeds)
        require(min(seeds) >= 0, "seeds", "must not be negative", seeds)
        require(len(set(seeds)) == len(seeds), "seeds", "must not name a seed twice", seeds)
        require(
            self.weights == "stored",
            "weights",
            "must be stored: random weights know no answers",
            self.weights,
        )
        bias = self.decoding.synthetic_acceptance
        rule = "must be null: with tokens accepted at random the answers mean nothing"
        require(bias is None, "decoding.synthetic_acceptance", rule, bias)


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(PromptedSettings):
    """`recovery`: does speculative decoding recover the target's own distribution?

    Attributes:
        draft: None tests the regular arm, of engines other than ours.
        num_prompts: of the greedy comparison; the sampled tests use the few of them that show most.
        num_draws: sampled continuations, over all tests; `auto` takes 60,000, or as many more as a verdict needs.
        false_alarm_rate: chance that the sampled tests of one run call a lossless pair lossy.
        shift: change of a token's distribution, in total variation, for which the power of the tests is stated.
        fault: a mistake planted on purpose, which the same tests must catch.
        batch_size: rows generated at once.
    """

    num_prompts: int = 15
    num_draws: int | Literal["auto"] = "auto"
    false_alarm_rate: float = 1e-9
    shift: float = 0.05
    fault: Fault = "none"

    COMPARES_TEXTS = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_prompts=1)
        rule = "must be auto or at least 1000, and at most 10^8"
        fits = self.num_draws == "auto" or 1000 <= self.num_draws <= 10**8
        require(fits, "num_draws", rule, self.num_draws)
        require(
            0 < self.false_alarm_rate < 1,
            "false_alarm_rate",
            "must be in (0, 1)",
            self.false_alarm_rate,
        )
        require(0 < self.shift <= 0.5, "shift", "must be in (0, 0.5]", self.shift)
        decoding = self.decoding
        rule = "must be none where decoding.synthetic_acceptance replaces the acceptance rule"
        require(
            self.fault == "none" or decoding.synthetic_acceptance is None, "fault", rule, self.fault
        )
        shows = decoding.temperature > 0 or self.fault in (
            "none",
            "bonus_from_wrong_position",
            "rollback_off_by_one",
        )
        require(shows, "fault", "changes nothing at decoding.temperature=0", self.fault)
        plain = decoding.temperature == 1 and decoding.top_k == 0 and decoding.top_p == 1
        rule = "changes nothing at decoding.temperature=1 without top_k or top_p"
        require(not plain or self.fault != "residual_warped_twice", "fault", rule, self.fault)

    def check_engine(self, engine: Abilities) -> None:
        """See `RunSettings.check_engine`.

        Texts of other engines can be compared with the target's own distribution without a draft.
        """
        planted = self.fault != "none"
        require(engine.own_loop or not planted, "fault", "needs engine=local", self.fault)
        rule = "must be a model: without a draft nothing can be lost"
        if not engine.own_loop:
            rule = (
                "must be a model at temperature 0: "
                "greedy texts without a draft are compared with nothing"
            )
        sampled = not engine.own_loop and self.decoding.temperature > 0
        require(self.draft is not None or sampled, "draft", rule, "none")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RunSettings):
    """`plan`: does a pair fit, before anything is downloaded? Nothing is decoded: `seed`, `force` and the like have no
    effect, so that another command's settings can be planned unchanged.

    Attributes:
        gpus: how many GPUs to plan for, in place of those here.
        gpu_memory: of each, with its unit: `40GB` (10^9 bytes), `80GiB` (2^30 bytes).
        bandwidth: of a GPU's memory, or of main memory, in GB/s.
        prompt_length: tokens of the longest prompt.
    """

    gpus: int | None = None
    gpu_memory: str | None = None
    bandwidth: float | None = None
    prompt_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, gpus=1, prompt_length=1)
        require(self.gpus is None or self.gpus <= 1024, "gpus", "must be at most 1024", self.gpus)
        hint = (
            f" (did you mean {self.gpu_memory}GB?)"
            if re.fullmatch(r"\d+(\.\d*)?", self.gpu_memory or "")
            else ""
        )
        rule = f"must be an amount with its unit, such as 40GB or 80GiB{hint}"
        require(
            self.gpu_memory is None or bool(self.gpu_memory_bytes),
            "gpu_memory",
            rule,
            self.gpu_memory,
        )
        finite = self.bandwidth is None or 0 < self.bandwidth < float("inf")
        require(finite, "bandwidth", "must be positive, in GB/s", self.bandwidth)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`gpu_memory` in bytes; None where it is not set or is no amount."""
        units = {"m": 2, "g": 3, "t": 4}
        found = re.fullmatch(
            r"(\d+(?:\.\d*)?) ?([mgt])(i?)b?", self.gpu_memory or "", re.IGNORECASE
        )
        return found and round(
            float(found[1]) * (1024 if found[3] else 1000) ** units[found[2].lower()]
        )


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RunSettings):
    """`serve`: the pair over HTTP. `decoding` is what requests leave out.

    Attributes:
        host, port: to listen on; port 0 takes a free one.
        api_key_variable: name of the environment variable with the key that requests must bring.
        batch_size: answers that are generated at once.
        max_waiting: answers that may wait beyond those.
        max_prompt_tokens, max_new_tokens: of one answer, at most.
        max_body_mb: of a request, in MB (10^6 bytes).
        reports: CSV files and directories that the page draws.
    """

    host: str = "127.0.0.1"
    port: int = 5000
    api_key_variable: str | None = None
    max_waiting: int = 64
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    max_body_mb: float = 1.0
    reports: tuple[str, ...] = ("results",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_waiting=0, max_prompt_tokens=1, max_new_tokens=1)
        require(0 <= self.port < 2**16, "port", "must be from 0 to 65535", self.port)
        require(
            0 < self.max_body_mb <= 1000,
            "max_body_mb",
            "must be positive, and at most 1000",
            self.max_body_mb,
        )
        require(
            not self.tensor_parallel, "placement", "is for the other commands", "tensor_parallel"
        )
        default = self.decoding.max_new_tokens
        rule = f"must be at most max_new_tokens={self.max_new_tokens}"
        require(default <= self.max_new_tokens, "decoding.max_new_tokens", rule, default)
        rule = "must name a variable with a key, because others can reach this host"
        require(
            is_loopback(self.host) or self.api_key_variable is not None,
            "api_key_variable",
            rule,
            self.api_key_variable,
        )

    def check_engine(self, engine: Abilities) -> None:
        """See `RunSettings.check_engine`."""
        rule = "must be local: serve runs our own loop"
        require(engine.own_loop, "engine", rule, self.engine.name)
