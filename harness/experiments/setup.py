"""What every command does around its decoding: between its settings and its first token, and at its end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from harness.config.commands import ChatTemplate, RunSettings
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.experiments.arms import Players, players, resolve
from harness.experiments.prompts import Prompt
from harness.models.devices import as_run_error
from harness.models.loading import Pair, PlannedPair, make_room, plan_pair
from harness.models.tokenizers import encode_prompts, max_context
from harness.results.environment import cpu_name, environment_columns
from harness.results.files import append_rows
from harness.results.measurement import measurement_digest


@dataclass
class RunRecord:
    """How a run went: what all its rows say.

    Attributes:
        settings: as they were given.
        directory: of the run.
        devices: names of the devices it ran on, once they are known.
        runner: what ran the models, once that is known; see `Players.runner`.
        setup_seconds: what compiling and capturing took.
        status: `ok`, `failed` or `interrupted`.
        error: why, if it is not ok.
    """

    settings: RunSettings
    directory: Path
    devices: list[str] = field(default_factory=list)
    runner: str | None = None
    setup_seconds: float | None = None
    status: str = "ok"
    error: str | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what ends the block early. A failure that is known leaves it as a RunError."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.status, self.error = "interrupted", str(interrupt) or "stopped by the user"
            raise
        except Exception as exception:
            explained = as_run_error(exception)
            self.status = "failed"
            self.error = " ".join(str(explained or exception or type(exception).__name__).split())
            raise explained or exception from exception

    def columns(self) -> dict[str, Any]:
        """The same in every row that is written at once: a reader knows by them what belongs together."""
        return {
            "status": self.status,
            "error": self.error,
            "runner": self.runner,
            "setup_s": self.setup_seconds,
            **environment_columns(self.devices),
            "measurement": measurement_digest(self.settings),
            "directory": str(self.directory),
        }


class PairKeeper:
    """Plans and loads pairs, and keeps the last one for the next run that wants the same.

    Args:
        report: told `True` when it begins with something that may fail for this pair, `False` when that has gone well.
    """

    def __init__(self, report: Callable[[bool], None] = lambda begins: None) -> None:
        self._report = report
        self._wanted: object = None
        self._planned: PlannedPair | None = None
        self._pair: Pair | None = None

    def plan(self, settings: RunSettings) -> PlannedPair:
        """See `plan_pair`."""
        if self._planned is None or self._wanted != settings.pair:
            self._planned = self._pair = None
            self._report(True)
            self._planned = plan_pair(
                settings.model,
                settings.draft,
                settings.placement,
                settings.dtype,
                force=settings.force,
                weights=settings.weights,
            )
            self._report(False)
            self._wanted = settings.pair
        # Before any weights load, a runner that the devices do not have is refused.
        resolve(settings.runner, self._planned.devices)
        return self._planned

    def make_room(
        self, settings: RunSettings, batch_size: int, longest_prompt: int, max_new_tokens: int
    ) -> PlannedPair:
        """Place the pair that was planned last so that its caches fit too; see `loading.make_room`."""
        if self._planned is None:
            raise ValueError("plan a pair first")
        num_tokens = settings.row_tokens(longest_prompt, max_new_tokens)
        # One that is loaded lies where it lies.
        if self._pair is None:
            self._planned = make_room(self._planned, settings.placement, batch_size, num_tokens, force=settings.force)
        return self._planned

    def load(self) -> Pair:
        """The pair that was planned last."""
        if self._planned is None:
            raise ValueError("plan a pair first")
        if self._pair is None:
            self._report(True)
            self._pair = self._planned.load()
            # Loading leaves much behind, and nothing that follows looks through it again.
            gc.collect()
            self._report(False)
        return self._pair


def device_names(devices: Sequence[torch.device]) -> list[str]:
    """What the devices are sold as: `NVIDIA A100-SXM4-40GB`, or the CPU's model name."""
    return [torch.cuda.get_device_name(d) if d.type == "cuda" else cpu_name() or "unknown CPU" for d in devices]


def take_part(
    settings: RunSettings,
    pair: Pair,
    token_ids: Sequence[Sequence[int]],
    record: RunRecord,
    *,
    decoding: DecodingSettings | None = None,
    share_prefix: bool = False,
) -> Players:
    """The players of a run, prepared for its longest prompt and its largest batch, and noted in its record.

    Args:
        decoding: where it is not that of the settings.
        share_prefix: see `players`.
    """
    found = players(
        pair,
        decoding or settings.decoding,
        share_prefix,
        runner=settings.runner,
        batch_size=min(settings.batch_size, len(token_ids)),
        longest_prompt=max(map(len, token_ids)),
    )
    record.runner, record.setup_seconds = found.runner, found.setup_seconds
    return found


def append_run(settings: RunSettings, file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Append a run's rows to its own file and to the cumulative one; gives the latter, as it is called in the end."""
    append_rows(file, rows)
    return append_rows(settings.results.file, rows)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], chat_template: ChatTemplate
) -> list[list[int]]:
    """Token ids of each prompt, through the chat template where the setting and the tokenizer want it."""
    return encode_prompts(tokenizer, [prompt.chat() for prompt in prompts], chat_template)


def check_context(
    planned: PlannedPair, token_ids: Sequence[Sequence[int]], max_new_tokens: int, setting: str = "prompts"
) -> None:
    """Refuse, before weights load, what is longer than a model's context.

    Args:
        setting: where the prompts come from.

    Raises:
        SettingError: for the longest prompt, with the numbers.
    """
    longest = max(range(len(token_ids)), key=lambda index: len(token_ids[index]))
    needed = len(token_ids[longest]) + max_new_tokens
    for checkpoint in planned.checkpoints:
        limit = max_context(checkpoint.config)
        if limit is not None and needed > limit:
            which = f"prompt {longest}" if setting == "prompts" else "it"
            raise SettingError(
                setting,
                f"{which} has {len(token_ids[longest])} tokens; with decoding.max_new_tokens={max_new_tokens} "
                f"that is {needed}, and {checkpoint.role}={checkpoint.settings.name} takes {limit}",
            )


def stop_tokens(pair: Pair) -> frozenset[int]:
    """The token ids at which the target ends a text by itself."""
    configured = pair.target.model.generation_config.eos_token_id if pair.target.model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured, pair.tokenizer.eos_token_id]
    return frozenset(int(token) for token in ids if token is not None)
