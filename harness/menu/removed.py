"""Names that could be typed once, and what to type instead."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from harness.config.errors import SettingError

# A command, a setting by its full name, or a setting with values, of which `*` is any part: `draft=*+*`.
_TRAINING = (
    "train with speculators or SpecForge; draft= reads their heads by directory or repository"
)
_SPLIT_LAYERS = "placement=balanced divides the layers over GPUs; vllm serve --tensor-parallel-size splits each layer"
_ONE_PART = (
    "no pair of drafts was faster than its better part: -m draft=suffix,tiny_eagle3 finds that one"
)
_RACE = "acceptance -m ranks many drafts and K in a minute; then latency -m times the few left, to precision=2%"
REMOVED: dict[str, str] = {
    "distill": _TRAINING,
    **dict.fromkeys(
        ("draft=eagle3", "draft=dflash", "draft=dflash2", "draft=jetspec", "draft=medusa"),
        _TRAINING,
    ),
    **dict.fromkeys(
        ("placement=tensor_parallel", "placement.strategy=tensor_parallel"), _SPLIT_LAYERS
    ),
    "race": _RACE,
    "share": _RACE,
    **dict.fromkeys(("draft=lookup+*", "draft=suffix+*", "draft.least_text"), _ONE_PART),
    **dict.fromkeys(
        ("model.placement=tensor_parallel", "draft.placement=tensor_parallel"), _SPLIT_LAYERS
    ),
}


def refuse_removed(name: str, value: str = "", known: Collection[str] = ()) -> None:
    """Raise a SettingError for a name that was removed, or one with a value that was.

    Args:
        name: a command or a setting, with or without its group.
        value: as typed, with commas between several; "" for none.
        known: settings that there are; a command of the user's own may have one of a removed name.
    """
    for removed, instead in REMOVED.items():
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
