"""Draft heads before and after their weights load: which repositories are heads, of which kind, and
for which target.

A head must match its target exactly, down to the shape of every tensor.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings
from harness.drafting.blocks import Head, HeadConfig, LayeredHead
from harness.drafting.head_formats import StoredHead, check_types
from harness.drafting.slot_cache import SPARE_SLOTS
from harness.menu.head_kind import HeadKind
from harness.models.checkpoints import Checkpoint, ask_hub, source
from harness.models.failures import explain, first_line
from harness.models.random_weights import RandomTensor
from harness.models.sketch import Block, LayerCache, Sketch, TensorSketch

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Copies of the target's tensors for training, the inverse of d2t, and what follows from the
# configuration.
_UNUSED = ("t2d", "verifier_lm_head", "verifier_norm", "rotary_emb")
_LOOKED_UP = (
    "embed_tokens.weight",
    "markov_head.markov_w1.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "d2t",
)


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head before its weights load.

    Attributes:
        kind: the record of its kind.
        settings: as the user gave them.
        files: that hold its tensors; none for random weights.
        raw: the configuration as it is stored.
    """

    kind: HeadKind
    settings: ModelSettings
    config: HeadConfig
    files: tuple[Path, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_confidence(self) -> bool:
        """Whether it estimates the chance that a token is accepted."""
        return bool(getattr(self.config, "confidence", False))

    def build(self) -> Head:
        """The module, without memory for its weights. Raises SettingError for sizes that make
        none.
        """
        try:
            with torch.device("meta"):
                return self.kind.build(self.config)
        # Whatever the layers of transformers raise for such a configuration.
        except Exception as error:
            cause = f"{type(error).__name__}: {first_line(error)}"[:200]
            rule = f"has a config.json from which no {self.kind.name} head can be built ({cause})"
            raise SettingError("draft", rule, self.settings.name) from error

    def sketch(self, dtype: torch.dtype) -> Sketch:
        """Its sizes; it stays on one device. What it borrows from the target is read, but not
        held.
        """
        state = self.build().state_dict()
        tensors = [
            TensorSketch(
                name,
                tensor.numel(),
                None if tensor.is_floating_point() else tensor.itemsize,
                read_per_token=name not in _LOOKED_UP,
            )
            for name, tensor in state.items()
        ]
        own = getattr(self.config, "transformer", None)
        cached = 2 * own.num_hidden_layers * own.num_key_value_heads * own.head_dim if own else 0
        return Sketch(
            role="draft",
            settings=self.settings,
            dtype=dtype,
            blocks=(Block(("",), tuple(tensors), (LayerCache("", cached),)),),
            num_parameters=sum(tensor.count for tensor in tensors if tensor.name != "d2t"),
            vocabulary_size=self.config.vocabulary_size,
            class_name=self.kind.name,
            spare_slots=SPARE_SLOTS,
            borrowed_bytes=dtype.itemsize * self.config.borrowed_outputs,
            drafts_in_one_pass=self.kind.one_pass,
        )

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """The head on a device, in the type of the target's hidden states.

        `target` lends to heads that are built from it.

        Raises:
            RunError: a file that cannot be read; a table of tokens that names one twice, or one
                that there is not.
        """
        module = self.build()
        if self.files:
            state = _read(self.settings, self.files, "cpu")
        else:
            state = {
                name: self._random(name, tensor) for name, tensor in module.state_dict().items()
            }
        if module.d2t is not None:
            state["d2t"] = self._checked_map(state["d2t"].long())
        placed = {}
        for name in module.state_dict():
            tensor = state[name]
            placed[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        module.load_state_dict(placed, assign=True)
        if isinstance(module, LayeredHead):
            module.rotary_emb.to(device)
        return module.eval().requires_grad_(False)

    def _random(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of random weights, the same in every run and process."""
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        seeded = f"{self.settings.repository} {self.kind.name} {name}"
        return RandomTensor(seeded, tensor.shape, torch.float32, "cpu")[...]

    def _checked_map(self, offsets: Tensor) -> Tensor:
        """`d2t`. Raises RunError where it names a token twice, or one that there is not."""
        tokens = offsets + torch.arange(len(offsets))
        is_injective = len(tokens.unique()) == len(tokens)
        if not is_injective or not 0 <= tokens.min() <= tokens.max() < self.config.vocabulary_size:
            place = self.settings.repository
            raise RunError(f"draft: d2t of {place} is no map into the target's vocabulary")
        return offsets


def read_head(
    settings: ModelSettings,
    target: Checkpoint,
    kinds: Iterable[HeadKind],
    *,
    layers: Sequence[int] | None = None,
    weights: bool = True,
) -> HeadCheckpoint | None:
    """The head that a repository holds; None where it holds no head, or nothing that can be read.

    Args:
        target: which the head must match.
        kinds: of heads that are known.
        layers: indices into the target's hidden states that override the configuration's.
        weights: False where none are needed: tensors are then those that the format usually has.

    Raises:
        SettingError: a head for another target, in a format that is not known completely, or with
            other tensors.
        RunError: weights that cannot be fetched.
    """
    raw = (
        dict(settings.architecture or {})
        if not weights and settings.architecture
        else _read_json(settings)
    )
    stored = StoredHead(settings, target, raw, layers)
    kind = next((kind for kind in kinds if raw and kind.recognises(raw)), None)
    if kind is None:
        if stated := raw.get("speculators_model_type"):
            raise stored.refused(f"is a speculators head of type {stated}, which is not supported")
        if raw and layers is not None:
            rule = f"is for heads and early_exit, and draft={settings.name} is a model"
            raise SettingError("draft.layers", rule, tuple(layers))
        return None
    if settings.quantization != "none":
        raise SettingError("draft.quantization", "must be none for a head", settings.quantization)
    files = _find_weights(settings, kind) if weights else ()
    tensors = _read(settings, files, "meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_types(stored, raw)
    config = kind.config(stored, shapes if weights else None)
    head = HeadCheckpoint(kind, settings, config, files, raw)
    if weights:
        _check_tensors(head, shapes)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() and name != "d2t":
                rule = f"{name} holds integers, and weights of a head are floating-point numbers"
                raise SettingError("draft", rule, settings.name)
    return head


def _check_tensors(head: HeadCheckpoint, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a SettingError unless the stored tensors are exactly those of the module."""
    needed = {name: tuple(tensor.shape) for name, tensor in head.build().state_dict().items()}
    where = f"a head of kind {head.kind.name}"
    rule = None
    if missing := sorted(needed.keys() - found.keys()):
        rule = f"{len(missing)} tensors of {where} are missing (the first: {missing[0]})"
    elif unknown := sorted(found.keys() - needed.keys() - {"d2t"}):
        rule = f"{len(unknown)} tensors are not known in {where} (the first: {unknown[0]})"
    elif other := [name for name, shape in needed.items() if shape != found[name]]:
        shapes = list(found[other[0]]), list(needed[other[0]])
        rule = (
            f"{other[0]} has shape {shapes[0]}; its configuration and the target need {shapes[1]}"
        )
    if rule is not None:
        raise SettingError("draft", rule, head.settings.name)


def _read_json(settings: ModelSettings) -> dict[str, Any]:
    """The repository's configuration; empty where there is none, or none within reach."""
    try:
        ask_hub(settings)
        path = fetch(settings, "config.json")
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except Exception:  # `read_checkpoint` says why
        return {}


def _find_weights(settings: ModelSettings, kind: HeadKind) -> tuple[Path, ...]:
    try:
        for name in _INDICES:
            if (index := fetch(settings, name)) is not None:
                return _find_shards(settings, index)
        for name in kind.weight_files:
            if (path := fetch(settings, name)) is not None:
                return (path,)
    except Exception as exception:
        raise explain(exception, "draft", settings) or exception from exception
    raise SettingError("draft", f"holds no weights ({', '.join(kind.weight_files)})", settings.name)


def _find_shards(settings: ModelSettings, index: Path) -> tuple[Path, ...]:
    """The files that an index names. Raises SettingError where one of them is absent."""
    found = []
    for shard in sorted(set(read_weight_map(settings, "draft", index).values())):
        path = fetch(settings, shard)
        if path is None:
            raise SettingError("draft", f"lacks {shard}, which {index.name} names", settings.name)
        found.append(path)
    return tuple(found)


def read_weight_map(settings: ModelSettings, role: str, index: Path) -> dict[str, str]:
    """The file of each tensor, as an index tells it. Raises RunError for one that tells no
    files.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        is_whole = isinstance(weight_map, dict)
        is_whole = is_whole and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise RunError(f"{role}: {index.name} of {settings.repository} is damaged")
    return weight_map


def _without_numbers(part: Any) -> Tensor:
    """A stored tensor's shape on the meta device, with the kind of its numbers."""
    floating = part.get_dtype().startswith(("F", "BF"))
    dtype = torch.float32 if floating else torch.long
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def fetch(settings: ModelSettings, name: str) -> Path | None:
    """A file of the repository, downloaded if need be; None where there is none of this name."""
    path = cached_file(
        source(settings),
        name,
        revision=settings.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if path is None else Path(path)


def _read(settings: ModelSettings, files: Sequence[Path], device: str) -> dict[str, Tensor]:
    """All tensors under the names that the modules have; on `meta` without their numbers."""
    state: dict[str, Tensor] = {}
    try:
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as stored:
                    for name in stored.keys():  # noqa: SIM118
                        part = stored.get_slice(name)
                        state[name] = _without_numbers(part) if device == "meta" else part[:]
            else:
                loaded = torch.load(file, map_location=device, weights_only=True)
                if not isinstance(loaded, dict) or not all(
                    isinstance(name, str) and isinstance(tensor, Tensor)
                    for name, tensor in loaded.items()
                ):
                    raise RunError(
                        f"draft: {file.name} of {settings.repository} holds no tensors by name"
                    )
                state |= loaded
    except pickle.UnpicklingError as error:
        raise RunError(
            f"draft: {file.name} of {settings.repository} is damaged or holds more than tensors"
        ) from error
    except Exception as exception:
        raise explain(exception, "draft", settings) or exception from exception
    used = {}
    for name, tensor in state.items():
        name = name.replace("midlayer.", "layers.0.")
        if not any(unused in name for unused in _UNUSED):
            used[name] = tensor
    return used
