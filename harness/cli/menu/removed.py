"""Names that could be typed once, and what to type instead."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from harness.config.errors import SettingError

_TRAINING = (
    "train with speculators or SpecForge; draft= reads their heads by directory or repository"
)
_SPLIT_LAYERS = "placement=balanced divides the layers over GPUs; vllm serve --tensor-parallel-size splits each layer"
_ONE_PART = (
    "no pair of drafts was faster than its better part: -m draft=suffix,tiny_eagle3 finds that one"
)
_FAULTS = (
    *("argmax_beyond_two_rows", "leaving_off_by_one", "lenience", "neighbour_temperature"),
    *("rows_swapped", "stale_prefix", "logprobs_after_temperature", "logprobs_missing_in_bursts"),
    *("logprobs_of_draft", "logprobs_of_previous_position", "logprobs_zero"),
)
_OWN_FAULT = "one of your own is a file: fault=./f.py"
_SHAPE = "draft.tree=dynamic has the likeliest branches of a head"
_RACE = "acceptance -m ranks many drafts and K in a minute; then latency -m times the few left, to precision=2%"
_COMMAND = "type the server's own command last: harness latency -- "
_IN_COMMAND = (
    "is part of the command that is typed last: harness latency -- env NAME=VALUE PROGRAM FLAGS"
)
_TWO_COMMANDS = "harness latency -- COMMAND -- COMMAND compares any two"
_LOADED = f"a server whose draft is loaded and not used is a command too: {_TWO_COMMANDS}"

COMMANDS: dict[str, str] = {"distill": _TRAINING}
# Settings by their full names, and settings with values, of which `*` is any part: `draft=suffix+*`.
SETTINGS: dict[str, str] = {
    "decoding.synthetic_acceptance=*.json": "type the rates as a list: '[0.9,0.8,0.6]'",
    "decoding.rule=eagle": "deepmind verifies trees without loss",
    "draft=dflash": _TRAINING,
    "draft=dflash2": _TRAINING,
    "draft=eagle3": _TRAINING,
    "draft=jetspec": _TRAINING,
    "draft=medusa": _TRAINING,
    "draft=llama3.3_70B-eagle3": "the repository is RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "draft=lookup+*": _ONE_PART,
    "draft=suffix+*": _ONE_PART,
    "draft.least_text": _ONE_PART,
    "draft.rates": _SHAPE,
    "draft.score_temperature": "trees are scored at temperature 1, as in EAGLE-2",
    "draft.tree=static": _SHAPE,
    "draft.placement=tensor_parallel": _SPLIT_LAYERS,
    "model=llama3.3_70B": "the repository is meta-llama/Llama-3.3-70B-Instruct",
    "model.placement=tensor_parallel": _SPLIT_LAYERS,
    **{f"fault={name}": f"{_OWN_FAULT}:{name.title().replace('_', '')}" for name in _FAULTS},
    "placement=tensor_parallel": _SPLIT_LAYERS,
    "placement.strategy=tensor_parallel": _SPLIT_LAYERS,
    "engine=harness_server": f"{_COMMAND}harness serve model=MODEL draft=DRAFT",
    "engine=llama_server": f"{_COMMAND}llama-server -m MODEL.gguf --spec-type ...",
    "engine=sglang_server": f"{_COMMAND}sglang serve --model-path MODEL --speculative-algorithm ...",
    "engine=vllm": f"{_COMMAND}vllm serve MODEL --speculative-config ...",
    "engine=vllm_server": f"{_COMMAND}vllm serve MODEL --speculative-config ...",
    "engine.aa": f"the same command twice measures identical arms: {_TWO_COMMANDS}",
    "engine.environment": _IN_COMMAND,
    "engine.flags": _IN_COMMAND,
    "engine.idle_url": _LOADED,
    "engine.places": f"a command may choose its device (env CUDA_VISIBLE_DEVICES=0 ...); {_TWO_COMMANDS}",
    "engine.program": _IN_COMMAND,
    "engine.start": f"{_COMMAND}COMMAND; {_TWO_COMMANDS}",
    "engine.tax": _LOADED,
    "engine.tensor_parallel_size": f"{_COMMAND}vllm serve MODEL --tensor-parallel-size ...",
    "max_body_mb": "a request may be as large as its prompts of max_prompt_tokens need",
    "num_resamples": "10,000 are always drawn: more change the ends of an interval by less than 1 % of its width",
    "race": _RACE,
    "results.export": "latency.csv and latency_prompts.csv have the figures; map writes vLLM's schedule",
    "share": "every cell of a map's grid is measured",
    "sweeper": "K=1,2,4,8 with -m measures each; repeats of what was measured are taken over",
}


def refuse_removed_command(name: str) -> None:
    """Raise a SettingError for a command that was removed."""
    if name in COMMANDS:
        raise SettingError(name, f"was removed: {COMMANDS[name]}")


def refuse_removed(name: str, value: str = "", known: Collection[str] = ()) -> None:
    """Raise a SettingError for a setting that was removed, or one with a value that was.

    Args:
        name: of the setting, with or without its group.
        value: as typed, with commas between several; "" for none.
        known: settings that there are; a command of the user's own may have one of a removed name.
    """
    for removed, instead in SETTINGS.items():
        setting, _, pattern = removed.partition("=")
        is_named = setting == name or setting.endswith(f".{name}") or name.startswith(f"{setting}.")
        if not is_named:
            continue
        rule = f"was removed: {instead}"
        if not pattern and name not in known:
            raise SettingError(name, rule)
        for choice in value.split(","):
            if pattern and fnmatchcase(choice, pattern):
                raise SettingError(name, rule, choice)
