"""The parts of a run's settings: models, placement, decoding, prompts. They are frozen and cannot hold a wrong value.

`cli/conversion.py` makes these objects from a composed configuration. Each dataclass checks its values in
`__post_init__`. The error names the setting, the rule and the value, and the conversion adds the name of the group.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from harness.config.acceptance_rules import RULES
from harness.config.errors import SettingError
from harness.config.repositories import check_files
from harness.config.secrets import note_key

Quantization = Literal["none", "8bit", "4bit"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LARGEST_K = 1024
# The most bytes of a file's name and of a path on Linux. On macOS a name may also have 255.
_LONGEST_NAME = 255
_LONGEST_PATH = 4095
# With `auto`, K follows the schedule of transformers, which begins with _FIRST_AUTO_K and may grow.
NumDraftTokens = int | Literal["auto"]
_FIRST_AUTO_K = 20
# The endings of files with prompts, and the meanings that a column of such a file can have.
PROMPT_FILES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS = (
    "prompt",
    "turns",
    "messages",
    "conversations",
    "question",
    "instruction",
    "category",
)


def require(holds: bool, setting: str, rule: str, value: object) -> None:
    """Raise a SettingError with this setting, rule and value unless the rule holds."""
    if not holds:
        raise SettingError(setting, rule, value)


def api_key(setting: str, variable: str | None) -> str | None:
    """Return the key in the environment variable that a setting names; None if the setting is empty.

    From then on the key is kept out of all messages.

    Args:
        setting: the setting's name, for errors.
        variable: the setting's value.

    Raises:
        SettingError: there is no such variable, it is empty, or its value cannot be part of an HTTP header.
    """
    if not variable:
        return None
    key = os.environ.get(variable)
    if not key:
        # The user may have typed the key itself in place of a variable's name. Never print a key.
        shown = variable if re.fullmatch(r"[A-Z_][A-Z\d_]*", variable) else "***"
        raise SettingError(setting, "must name a variable of the environment", shown)
    is_possible = key.isascii() and key.isprintable() and " " not in key
    rule = "its value has a space, a line break, or a character that is not ASCII"
    require(is_possible, setting, rule, variable)
    note_key(key)
    return key


_ADDRESS_RULE = "must be an address such as http://host:8000/v1"


def check_address(setting: str, url: str | None) -> None:
    """Raise a SettingError if `url` is not the address of a server, or contains a user, a password or a query.

    None is accepted.
    """
    if url is None:
        return
    # Checked first, because `urlsplit` drops line breaks.
    is_printable = url.isprintable() and " " not in url
    require(is_printable, setting, _ADDRESS_RULE, "***" if re.search("[@?]", url) else repr(url))
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingError(setting, _ADDRESS_RULE, "***") from error
    # Settings are written into rows, so they must not contain a password. Nor must this message.
    rule = "must hold no user, password or query: use api_key_variable"
    require("@" not in parts.netloc and not parts.query, setting, rule, "***")
    try:
        is_possible = parts.port is None or parts.port > 0
    except ValueError:  # no number, or one that is too large
        is_possible = False
    is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and is_possible
    require(is_address, setting, _ADDRESS_RULE, "***" if "@" in url else url)


def require_at_least(settings: object, **least: float) -> None:
    """Raise a SettingError if a field of `settings` is below its bound: `require_at_least(self, batch_size=1, seed=0)`.

    A field that is None is accepted.
    """
    for name, bound in least.items():
        value = getattr(settings, name)
        rule = f"must be at least {bound}" if bound else "must not be negative"
        require(value is None or value >= bound, name, rule, value)


def rule_of_paths(path: str) -> str | None:
    """Return the rule for lengths of paths that this path breaks; None if it breaks none."""
    encoded = path.encode(errors="replace")
    if max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        return f"must not have a name of more than {_LONGEST_NAME} bytes"
    if len(encoded) > _LONGEST_PATH:
        return f"must have at most {_LONGEST_PATH:,} bytes"
    return None


def require_possible_path(setting: str, path: str | None) -> None:
    """Raise a SettingError if no file system can have this path; None is accepted."""
    if path is not None and (rule := rule_of_paths(path)):
        raise SettingError(setting, rule, path)


def _last_part(name: str) -> str:
    """Return the last part of a model's name in lower case: `org/Tiny` and `./tiny.gguf` -> `tiny`."""
    return name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model with weights: where they are, and how they are loaded.

    Attributes:
        name: as typed on the command line, `7B_8bit`.
        repository: a hub repository or a directory; the tokenizer comes from there too unless `tokenizer` is set.
        revision: branch, tag or commit of the repository; None for its main branch.
        architecture: keyword arguments of the transformers configuration, including `model_type`, so that planning
            and random weights need no network. None for models named by path.
        quantization: how bitsandbytes quantizes the weights as they load; a suffix of the
            name, `7B_8bit`, does the same.
        dtype: number format of the weights that are not quantized; None for the run's.
        gpus: how many GPUs this model may use; None for the placement's.
        gguf_file: file name inside `repository` when the weights are GGUF.
        tokenizer: a repository or a directory; None for the model's own.
        trust_remote_code: run code that comes with the repository.
    """

    name: str
    repository: str
    revision: str | None = None
    architecture: Mapping[str, Any] | None = None
    quantization: Quantization = "none"
    dtype: Dtype | None = None
    gpus: int | None = None
    gguf_file: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, gpus=1)
        require(bool(self.repository), "repository", "must name a repository or a directory", "")
        for name in ("repository", "tokenizer", "gguf_file"):
            value = getattr(self, name)
            require_possible_path(name, value)
            if value is not None and value.startswith("~"):
                # A shell expands `~` on a command line, but nothing does in a preset.
                object.__setattr__(self, name, os.path.expanduser(value))
        for name in ("repository", "tokenizer"):
            repository = getattr(self, name)
            if repository is not None:
                check_files(name, repository)

    def is_served_as(self, served: str) -> bool:
        """Return whether a server's name for its model is one of this model's names. Only the last parts are compared.

        Args:
            served: the server's name, such as `tiny.gguf`, or two names, such as `m (org/Tiny)`.
        """
        listed = served.removesuffix(")").split(" (")
        own = filter(None, (self.name, self.repository, self.gguf_file))
        return not set(map(_last_part, listed)).isdisjoint(map(_last_part, own))

    def is_same(self, other: ModelSettings) -> bool:
        """Return whether both settings describe the same model. Their names may differ."""
        names = {*ModelSettings.__dataclass_fields__} - {"name"}
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Settings of every draft. A drafting method that has further settings has a subclass.

    The settings of a draft with weights are also `ModelSettings` (`ModelDraftSettings` in `drafting.method`).

    Attributes:
        name: as typed on the command line, `lookup`.
        method: the way to draft.
    """

    name: str
    method: str

    @property
    def sampling(self) -> str | None:
        """How draft tokens are drawn: `target` (as the target draws) or `greedy`; None if the draft leaves no
        choice.
        """
        return None

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers of the target that the draft uses, if the user chose them; otherwise None."""
        return None

    def __post_init__(self) -> None:
        """Check nothing. Subclasses call `super().__post_init__()`, and the chain of these calls ends here."""


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Placement of the layers on devices.

    Attributes:
        strategy: `auto` uses the fewest GPUs that hold the model with its cache and draft, and
            balances the layers over them; `balanced` spreads them over all GPUs; `cpu` takes none.
            A draft is placed whole on the GPU with the most room.
        gpus: how many GPUs may be used, starting with the first visible one; None for all.
        reserve_gb: memory that is kept free on each GPU, on top of weights and KV cache, for activations and CUDA
            graphs, in GB (10^9 bytes); more if reading all prompts at once needs more.
    """

    strategy: Literal["auto", "balanced", "cpu"] = "auto"
    gpus: int | None = None
    reserve_gb: float = 2.0

    def __post_init__(self) -> None:
        require_at_least(self, gpus=1, reserve_gb=0)


# Only `serve` accepts K=0; `RunSettings` refuses it for other commands.
NO_DRAFT_TOKENS = "must be at least 1, or auto (draft=none measures without a draft)"


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How tokens are chosen and verified.

    Attributes:
        num_draft_tokens: K, tokens proposed per iteration; `auto` is transformers' schedule
            (engine=huggingface). With `serve` it may be 0: the draft is loaded and drafts nothing.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all.
        max_new_tokens: the most new tokens of an answer.
        rule: the acceptance rule: `deepmind` and `google` agree except for the lenience, which only
            `google` has; `block` accepts whole blocks, and is lossless too; `./file.py:Name` is a rule of
            your own.
        lenience: Leviathan's l in (0, 1]: accept with min(1, target(x) / (l draft(x))). Below 1 the output is no
            longer the target's.
        synthetic_acceptance: accept each draft token with this probability instead of by the rule, to see how fast the
            pair would be if the draft agreed that often. A list has a probability for each position, the last one
            for all later positions; None for the rule.
        ignore_eos: continue after end-of-sequence so that every arm generates the same number of tokens; `auto` does so
            unless prompts go through a chat template. (In `serve`, each request says it.)
    """

    num_draft_tokens: NumDraftTokens = 4
    temperature: float = 0.5
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    rule: str = field(default="deepmind", metadata={"choices": RULES.names})
    lenience: float = 1.0
    synthetic_acceptance: float | tuple[float, ...] | None = None
    ignore_eos: bool | Literal["auto"] = True

    def __post_init__(self) -> None:
        number = self.num_draft_tokens
        if number != "auto":
            require(number >= 0, "num_draft_tokens", NO_DRAFT_TOKENS, number)
            require(number <= LARGEST_K, "num_draft_tokens", f"must be at most {LARGEST_K}", number)
        temperature = self.temperature
        require(temperature >= 0, "temperature", "must not be negative (0 is greedy)", temperature)
        # Dividing logits by a smaller temperature would overflow.
        is_possible = temperature == 0 or temperature >= 1e-4
        rule = "must be 0 (greedy) or at least 0.0001"
        require(is_possible, "temperature", rule, temperature)
        require(self.top_k >= 0, "top_k", "must not be negative (0 keeps all)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        require_at_least(self, max_new_tokens=1)
        require(0 < self.lenience <= 1, "lenience", "must be in (0, 1]", self.lenience)
        # This loads a user's rule, so that a mistake in it is found before anything runs.
        takes_lenience = RULES[self.rule].takes_lenience
        rule = "needs decoding.rule=google; the other rules have no lenience"
        require(takes_lenience or self.lenience == 1, "lenience", rule, self.lenience)
        asked = self.synthetic_acceptance
        if asked is not None:
            rates = self.synthetic_rates or ()
            is_possible = bool(rates) and all(0 <= rate <= 1 for rate in rates)
            require(is_possible, "synthetic_acceptance", "must be in [0, 1]", asked)
            rule = "replaces the acceptance rule, so that lenience has no effect: leave one of them out"
            require(self.lenience == 1, "synthetic_acceptance", rule, asked)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """For each position, the probability that a draft token is accepted if all draft tokens before it were.

        The last number is for all later positions, too. None if the rule decides.
        """
        asked = self.synthetic_acceptance
        return (asked,) if isinstance(asked, float) else asked

    @property
    def most_draft_tokens(self) -> int:
        """K; for `auto`, the first K of the schedule, which may grow."""
        return _FIRST_AUTO_K if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own.

        A lenience below 1 always counts as lossy, although it changes nothing in greedy decoding.
        """
        if self.synthetic_acceptance is not None or self.lenience != 1:
            return True
        return not RULES[self.rule].is_lossless(self.temperature)


# Parameters of transformers' `apply_chat_template`, which are therefore no variables of a template.
_NO_TEMPLATE_VARIABLES = (
    "conversation",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "chat_template",
    "tools",
    "documents",
    "padding",
    "truncation",
    "max_length",
)


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """A prompt set: a `.txt` file with one prompt per line, or a table (`.jsonl`, `.json`, `.csv`, `.parquet`).

    Attributes:
        name: as rows and tables call it.
        file: its file; of `{a,b}.jsonl` both files are read, and `a` and `b` are categories.
        repository: data set on the hub that has the file; None for a file on this machine.
        revision: branch, tag or commit of the repository; None for its main branch. A branch is read
            as it was last fetched.
        columns: names of a table's columns, if they are not `prompt`, `turns`, `messages`,
            `conversations`, `question`, `instruction` or `category`: `{turns: ask}`.
        template: the text of a prompt, with names of columns in braces; None if a column holds it.
        template_arguments: variables of the chat template, `{enable_thinking: false}`, used when harness applies the
            template itself and, with `engine.chat=true`, sent to servers.
        system: a system prompt that precedes every prompt.
        lengths: numbers of tokens to which the texts of the set are cut, used in turn; without a chat template.
        turns: `first` answers only the first turn of a conversation, `all` every turn; each arm continues from its own
            answers.
        seed: seed for drawing the prompts of each category at random; None takes the first ones.
        licence: licence of the texts; each run prints it.
        source: where to get a file that is not on the hub; printed if the file is absent.
        too_long: if prompts do not fit into a model's context: refuse the run, or skip these prompts.
    """

    name: str
    file: str
    repository: str | None = None
    revision: str | None = None
    columns: Mapping[str, Any] | None = None
    template: str | None = None
    template_arguments: Mapping[str, Any] | None = None
    system: str | None = None
    lengths: tuple[int, ...] = ()
    turns: Literal["first", "all"] = "first"
    seed: int | None = None
    licence: str | None = None
    source: str | None = None
    too_long: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        rule = f"must be a preset, or a file that ends in {', '.join(PROMPT_FILES)}"
        require(self.file.endswith(PROMPT_FILES), "file", rule, self.file)
        if os.path.isabs(self.file):
            rule = "needs prompts.file=, a path inside the repository, and not on this machine"
            require(self.repository is None, "repository", rule, self.repository)
        require_at_least(self, seed=0)
        column_names = ", ".join(PROMPT_COLUMNS)
        for column in self.columns or ():
            require(
                column in PROMPT_COLUMNS, "columns", f"must name some of {column_names}", column
            )
        try:
            list(string.Formatter().parse(self.template or ""))
        except ValueError as error:
            raise SettingError("template", f"cannot be read: {error}", self.template) from None
        for name in self.template_arguments or ():
            is_free = name not in _NO_TEMPLATE_VARIABLES
            require(is_free, "template_arguments", "must be variables of the template", name)
        lengths = self.lengths
        are_positive = all(length > 0 for length in lengths)
        are_different = len(set(lengths)) == len(lengths)
        rule = "must be positive numbers of tokens, each named once"
        require(are_positive and are_different, "lengths", rule, lengths)
        rule = "cannot be combined with prompts.lengths, which cuts texts"
        require(self.turns == "first" or not lengths, "turns", rule, self.turns)
        require(self.system is None or not lengths, "system", rule, self.system)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `file` names: `{a,b}.jsonl` names `a.jsonl` and `b.jsonl`."""
        match = re.fullmatch(r"([^{}]*)\{([^{}]*)\}([^{}]*)", self.file)
        if match is None:
            return (self.file,)
        before, parts, after = match.groups()
        return tuple(f"{before}{part}{after}" for part in parts.split(","))


@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """Files of results, and how they are shown.

    Attributes:
        file: collects the rows of every run; relative to the working directory; None collects none.
        details: print every figure, not only the answer; `summary.txt` of the run has them in any case.
        format: `json` prints the run's `result.json` instead of the page; for a sweep, one line per job.
    """

    file: str | None
    details: bool = False
    format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        is_named = self.file is None or self.file.endswith(".csv")
        rule = "must name a file that ends in .csv; null collects no rows"
        require(is_named, "file", rule, self.file)
