"""The columns that all runs have, and the columns of commands that decode. Each kind of row adds further columns, in
its command's `rows.py`, in `results/rows/` or, for `latency`, in `measuring/rows.py`.

Writing, parsing, empty cells, `harness help columns`, and the settings in which rows differ all follow from the fields.
An unknown value is None in a row, and an empty cell in a file. All rows that one run wrote have the same value of
`run`, by which readers group them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from harness.config.engines import EngineSettings
from harness.config.settings import DecodingSettings, ModelSettings
from harness.results.row import Row, circumstance, pooled, setting
from harness.results.statistics.interval import Interval

if TYPE_CHECKING:
    import pandas as pd

# Types of columns; None means that the value is not known.
MaybeText = str | None
MaybeInt = int | None
MaybeFloat = float | None
MaybeBool = bool | None

# The status of a run whose arms cannot be compared (`verdict.py`).
NO_VERDICT = "no_verdict"
# The status of a sweep's job whose models showed that a setting is wrong, before anything was measured.
REFUSED = "refused"

# The engine with made-up costs and acceptance (`conf/engine/simulated_engine.py`).
SIMULATED = "simulated"
# The beginning of the address of a server on this machine, or of an address on which servers of this machine listen.
_LOOPBACK = re.compile(r"\w+://(localhost|127[.\d]*|0\.0\.0\.0|\[::1?\])(:|/|$)", re.IGNORECASE)
# `RunRow.is_elsewhere` for the engines of this project. None is the key for rows without an engine. Engines from a
# user's file are not listed: they are elsewhere if the column `weights` is empty.
_ELSEWHERE = {None: False, "local": False, "huggingface": False, "server": True, SIMULATED: True}
# Settings and circumstances of a pair that this process decodes. In the rows of engines in other processes,
# `Session.row` empties these cells; those that the server's engine knows, such as a typed K, are filled again
# (`EngineRecord.columns`).
LOCAL_PAIR_COLUMNS = (
    "num_draft_tokens",
    "weights",
    "weights_identity",
    "quantization",
    "draft_repository",
    "draft_weights_identity",
    "draft_quantization",
    "draft_method",
    "draft_sampling",
    "placement",
    "rule",
    "lenience",
    "lossy",
    "num_threads",
    "torch_version",
    "transformers_version",
    "bitsandbytes_version",
)

# The columns of `latency.csv` that most readers need, in the order in which they need them.
CORE_COLUMNS = (
    "status",
    "model",
    "draft",
    "num_draft_tokens",
    "batch_size",
    "devices",
    "arm",
    "ms_per_token",
    "speedup",
    "speedup_low",
    "speedup_high",
    "tokens_per_iteration",
)


@dataclass(frozen=True, kw_only=True)
class RunRow(Row):
    """A row with a run's result. A run that failed also has a row, with the reason."""

    job: MaybeText = circumstance("number of the job within its sweep, from 0")
    status: MaybeText = circumstance(
        "`ok`, `failed` or `interrupted`; `no_verdict` if its arms cannot be compared; of a plan also `does_not_fit`,"
        " of a sweep's job also `refused` (a wrong setting)"
    )
    error: MaybeText = circumstance("why the status is not `ok`")
    model: MaybeText = setting("name of the target, as typed", "model.name")
    draft: MaybeText = setting(
        "name of the draft, as typed; for a server, only a label", "draft.name"
    )
    batch_size: MaybeInt = setting("rows decoded at once", "batch_size")
    num_draft_tokens: int | Literal["auto"] | None = setting(
        "K, draft tokens per iteration, or `auto`", "decoding.num_draft_tokens", "tokens"
    )
    max_new_tokens: MaybeInt = setting(
        "new tokens per prompt, at most",
        "decoding.max_new_tokens",
        "tokens",
        phrase="{} new tokens",
    )
    weights: MaybeText = setting(
        "`stored`, or `random` if only the architecture is real", "weights"
    )
    repository: MaybeText = setting(
        "directory or hub repository of the target", "model.repository", phrase="weights of {}"
    )
    draft_repository: MaybeText = setting(
        "directory or hub repository of the draft",
        "draft.repository",
        phrase="draft weights of {}",
    )
    # A page does not mention a default: the words for it are empty (`said_as`).
    quantization: MaybeText = setting(
        "quantization of the target: `none`, `8bit` or `4bit`",
        "model.quantization",
        phrase="{}",
        said_as={ModelSettings.quantization: ""},
    )
    draft_quantization: MaybeText = setting(
        "quantization of the draft",
        "draft.quantization",
        phrase="{} draft",
        said_as={ModelSettings.quantization: ""},
    )
    draft_method: MaybeText = setting(
        "`model` for a model or a head, otherwise the method's name",
        "draft.method",
        phrase="drafts by {}",
        said_as={"model": ""},
    )
    draft_sampling: MaybeText = setting(
        "how draft tokens are drawn: `target` or `greedy`",
        "draft.sampling",
        said_as={"target": "", "greedy": "drafts by argmax"},
    )
    placement: MaybeText = setting(
        "strategy by which the target was placed", "placement.strategy", said_as={"auto": ""}
    )
    chat_template: MaybeText = setting(
        "whether prompts went through the chat template", "chat_template", said_as={"auto": ""}
    )
    settings: dict[str, Any] | None = setting(
        "settings that differ from their defaults and have no column"
    )
    weights_identity: MaybeText = circumstance(
        "`commit:` and the hub's commit of the target, or `files:` and a digest of"
        " names, sizes and sampled contents of its files"
    )
    draft_weights_identity: MaybeText = circumstance("the identity of the draft's weights")
    dtype: MaybeText = circumstance(
        "number format of the target's weights that are not quantized", phrase="{}"
    )
    weight_bytes: dict[str, int] | None = circumstance(
        "bytes of the target's weights, by device", "bytes"
    )
    draft_weight_bytes: dict[str, int] | None = circumstance(
        "bytes of the draft's weights, by device", "bytes"
    )
    engine: MaybeText = setting(
        "engine that generated the texts: `local`, `huggingface`, `server`, or the name of another engine",
        "engine.name",
        said_as={EngineSettings.name: ""},
    )
    url: MaybeText = setting(
        "address of the server; if there are two, of the server that speculates", "engine.url"
    )
    regular_url: MaybeText = setting(
        "address of the server that does not speculate", "engine.regular_url"
    )
    server: MaybeText = circumstance(
        "name and version that the server reports, with the slots of llama.cpp; if the servers differ, of both"
    )
    server_command: list[str] | None = circumstance(
        "command with which harness started the server of each arm, the regular one first"
    )
    served_model: list[str] | None = circumstance(
        "name of the model on the server, and place of its weights; if the servers differ, of both"
    )
    server_started: MaybeText = circumstance("start times reported by the servers, verbatim")
    runner: MaybeText = circumstance(
        "runner of the target, or of both models", said_as={"static": "", "generate": ""}
    )
    draft_runner: MaybeText = circumstance("runner of the draft, if it is another one")
    setup_s: MaybeFloat = circumstance("time to compile", "s")
    timestamp: MaybeText = circumstance("when the row was written, UTC")
    devices: MaybeText = circumstance(
        "names of the devices that computed, if known", phrase="on {}"
    )
    num_threads: MaybeInt = circumstance(
        "threads that computed on the CPU", phrase="CPU threads: {}"
    )
    harness_version: MaybeText = circumstance("version of harness")
    commit: MaybeText = circumstance("commit of harness, `-dirty` if changed")
    torch_version: MaybeText = circumstance("version of torch")
    transformers_version: MaybeText = circumstance("version of transformers")
    bitsandbytes_version: MaybeText = circumstance("version of bitsandbytes")
    measurement: MaybeText = circumstance(
        "digest of everything that determines the figures; equal for repetitions"
    )
    directory: MaybeText = circumstance("directory of the run")

    # At least one of these columns has a value if anything was measured, even in part; () means all columns with
    # figures.
    filled_if_measured: ClassVar[tuple[str, ...]] = ()
    # Whether runs with the same `measurement` are repetitions of each other.
    is_repeatable: ClassVar[bool] = True

    @classmethod
    def as_judged(cls, rows: Sequence[Any]) -> Sequence[Any]:
        """Return the rows of a run as readers get them: `LatencyRow` removes a speed-up of arms that cannot be
        compared.
        """
        return rows

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured, even in part (`filled_if_measured`)."""
        columns = self.columns()
        figures = self.filled_if_measured or [
            name for name in columns if columns[name].kind == "figure"
        ]
        return any(columns[name].of(self) is not None for name in figures)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the answers are those of a server, of the simulated engine, or of a user's engine whose weights are
        unknown.
        """
        return _ELSEWHERE.get(self.engine, self.weights is None)

    @property
    def is_simulated(self) -> bool:
        """Whether nothing was measured, because costs and acceptance are made up."""
        return self.engine == SIMULATED

    @property
    def questions_in_words(self) -> str | None:
        """A description of the questions if they are not from a prompt set, such as `multiplication of 1 to 99`;
        otherwise None.
        """
        return None

    @property
    def lacks_an_arm(self) -> bool:
        """Whether the row of another arm must follow this row. If a run ends with such a row, its file was cut off."""
        return False

    @property
    def is_on_another_machine(self) -> bool:
        """Whether the server's address is on another machine; False without an address."""
        return self.url is not None and _LOOPBACK.match(self.url) is None

    @property
    def has_same_command(self) -> bool:
        """Whether both arms are servers that were started by the same command."""
        commands = self.server_command or []
        return len(commands) == 2 and commands[0] == commands[1]

    @property
    def has_one_server(self) -> bool:
        """Whether both arms use one model on one server."""
        is_one_model = len(self.served_model or []) < 2
        return self.url is not None and self.url == self.regular_url and is_one_model

    @property
    def is_labelled(self) -> bool:
        """Whether the draft and K are only what the user typed, because the server was already running."""
        return bool(self.url and not self.server_command)

    @property
    def synthetic(self) -> bool:
        """Whether draft tokens were accepted at random, and not by the acceptance rule."""
        return bool(self.draft) and getattr(self, "synthetic_acceptance", None) is not None

    @property
    def real(self) -> bool:
        """Whether the figures belong to the models that the row names: no random weights, synthetic acceptance or
        made-up costs.
        """
        return self.weights != "random" and not self.synthetic and not self.is_simulated

    @property
    def is_batched(self) -> bool:
        """Whether rows were decoded together and have the same times; kinds of rows with times override
        this property.
        """
        return False

    @property
    def was_quiet(self) -> bool:
        """Whether no disturbance of the run's times is known; kinds of rows with times override this property."""
        return True


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """How many draft tokens were accepted."""

    acceptance_rate: MaybeFloat = pooled("mean", "accepted / proposed draft tokens")
    conditional_acceptance_rate: MaybeFloat = pooled(
        "mean", "accepted / tested draft tokens (alpha of Leviathan et al.)"
    )
    mean_acceptance_length: MaybeFloat = pooled(
        "mean",
        "tokens per iteration that proposed at least one token: 1 + accepted draft tokens / these iterations",
        "tokens",
    )


@dataclass(frozen=True, kw_only=True)
class AcceptedByIteration(Accepted):
    """`Accepted`, with how many were drafted, and the rates at each position; of an answer, or of an arm."""

    acceptance_by_position: list[float | None] | None = pooled(
        "mean", "accepted / tested at each draft position (conditional)"
    )
    mean_proposed: MaybeFloat = pooled("mean", "draft tokens per iteration that drafted", "tokens")
    tokens_per_iteration: MaybeFloat = pooled(
        "mean", "tokens after the first of each answer / all iterations", "tokens"
    )


@dataclass(frozen=True, kw_only=True)
class DecodedRow(Accepted, RunRow):
    """A row of a command that decodes."""

    temperature: MaybeFloat = setting(
        "temperature; 0 is greedy", "decoding.temperature", said_as={0: "greedy"}
    )
    top_k: MaybeInt = setting(
        "the k likeliest tokens are kept; 0 keeps all",
        "decoding.top_k",
        said_as={DecodingSettings.top_k: ""},
    )
    top_p: MaybeFloat = setting(
        "the likeliest tokens up to this mass are kept; 1 keeps all",
        "decoding.top_p",
        said_as={DecodingSettings.top_p: ""},
    )
    rule: MaybeText = setting(
        "acceptance rule",
        "decoding.rule",
    )
    lenience: MaybeFloat = setting(
        "lenience of the acceptance rule; below 1 is lossy", "decoding.lenience"
    )
    synthetic_acceptance: float | list[float] | None = setting(
        "probability with which draft tokens were accepted at random, a list by position; empty if by the rule",
        "decoding.synthetic_acceptance",
    )
    lossy: MaybeBool = setting(
        "whether the speculative output may differ from the target's; for a server true if the user said so,"
        " otherwise empty",
        "decoding.lossy",
    )
    ignore_eos: bool | Literal["auto"] | None = setting(
        "whether texts continued after the end of sequence; `auto` in a run that ended before this was decided",
        "decoding.ignore_eos",
        said_as={True: "ends at max_new_tokens", False: "ends where the model does"},
    )


@dataclass(frozen=True, kw_only=True)
class PromptedRow(DecodedRow):
    """A row of a command that decodes the prompts of a set."""

    prompts: MaybeText = setting("name of the prompt set", "prompts.name")
    prompts_file: MaybeText = setting("file of the prompt set", "prompts.file")
    num_skipped: MaybeInt = pooled("mean", "prompts that were left out because they are too long")
    prompts_digest: MaybeText = circumstance("digest of the prompt set's texts")


@dataclass(frozen=True, kw_only=True)
class WithSpeedup:
    """A speed-up with its interval."""

    speedup: Interval | None = pooled(
        "mean",
        "time per token of the regular arm / time per token of the speculative arm, on prompts that both answered",
        per="ms_per_token",
    )


@dataclass(frozen=True, kw_only=True)
class ComparedRow(WithSpeedup, DecodedRow):
    """A row with a speed-up; `verdict.py` decides what may be concluded from it."""


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a DataFrame, with `CORE_COLUMNS` first, then all other columns that are not empty.

    Rows of regular arms, which have no K, get the K of their run, so that `groupby` and `pivot` by K keep both arms.
    """
    import pandas as pd

    whole = pd.DataFrame([row.values() for row in rows])
    if {"run", "arm", "num_draft_tokens"} <= {*whole.columns}:
        # The first K of each run that is not empty.
        known_k = whole.groupby("run").num_draft_tokens.transform("first")
        k = whole.num_draft_tokens.mask(whole.arm == "regular", known_k)
        whole["num_draft_tokens"] = k if (k == "auto").any() else k.astype("Int64")
    first = [name for name in CORE_COLUMNS if name in whole.columns]
    others = whole.drop(columns=first).dropna(axis="columns", how="all")
    return whole[first].join(others)
