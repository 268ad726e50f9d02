"""Draft heads before and after their weights load: which repositories are heads, of which kind, and
for which target.

`read_head` decides that from a repository's config.json and the names and shapes of its tensors;
its `HeadCheckpoint` is planned with (`sketch`), and later loads the module (`load`). A head must
match its target exactly, down to the shape of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.failures import first_line
from harness.config.settings import DraftSettings, ModelSettings
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.blocks import Head, HeadConfig
from harness.local.drafting.heads.formats import StoredHead
from harness.local.drafting.heads.head_files import (
    find_weights,
    read_configuration,
    read_tensors,
)
from harness.local.drafting.heads.slot_cache import SPARE_SLOTS
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.random_weights import RandomTensor
from harness.local.models.sketch import Block, LayerCache, Sketch, TensorSketch


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head before its weights load.

    Attributes:
        kind: the record of its kind.
        settings: the draft's, as the user gave them.
        config: its sizes and options, checked against the target.
        files: the files with its tensors; empty for random weights.
    """

    kind: HeadKind
    settings: ModelSettings
    config: HeadConfig
    files: tuple[Path, ...] = ()

    def build(self) -> Head:
        """Build the module, without memory for its weights.

        Raises:
            SettingError: no module can have the configuration's sizes.
        """
        try:
            with torch.device("meta"):
                module: Head = self.kind.head_class(self.config)
                return module
        # Whatever the layers of transformers raise for such a configuration.
        except Exception as error:
            raise unbuildable(self.settings, self.kind, error) from error

    def sketch(self, dtype: torch.dtype) -> Sketch:
        """Return its sizes.

        The target's output matrix, if the head uses it, counts as bytes that a pass reads, and not as
        memory.
        """
        state = self.build().state_dict()
        tensors = [
            TensorSketch(
                name,
                count=tensor.numel(),
                itemsize=None if tensor.is_floating_point() else tensor.itemsize,
                read_per_token=self.config.share_read(name),
            )
            for name, tensor in state.items()
        ]
        cached_numbers = 0  # of each token: the keys and values of all layers of the head
        own = self.config.transformer
        if own is not None:
            cached_numbers = 2 * own.num_hidden_layers * own.num_key_value_heads * own.head_dim
        cache = LayerCache("", cached_numbers)
        # One block without a name: a head is never split over devices.
        block = Block(("",), tuple(tensors), (cache,))
        return Sketch(
            role="draft",
            settings=self.settings,
            dtype=dtype,
            blocks=(block,),
            num_parameters=sum(tensor.count for tensor in tensors if tensor.itemsize is None),
            vocabulary_size=self.config.vocabulary_size,
            class_name=self.kind.name,
            spare_slots=SPARE_SLOTS,
            borrowed_bytes=dtype.itemsize * self.config.borrowed_outputs,
            drafts_in_one_pass=self.kind.one_pass,
        )

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """Return the head on a device.

        Args:
            dtype: of the target's hidden states.
            target: the loaded target. It is not used here; `MtpCheckpoint` needs it, whose layers
                are in the target's own checkpoint.

        Raises:
            RunError: a file that cannot be read; a d2t (see `blocks.Head`) that names a token twice,
                or one that does not exist.
        """
        module = self.build()
        if self.files:
            state = read_tensors(self.settings, self.files, "cpu")
        else:
            # The same random weights in every run and process.
            state = {}
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    seeded = f"{self.settings.repository} {self.kind.name} {name}"
                    state[name] = RandomTensor(seeded, tensor.shape, torch.float32, "cpu")[...]
                else:
                    state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if module.d2t is not None:
            state["d2t"] = state["d2t"].long()
            tokens = state["d2t"] + torch.arange(len(state["d2t"]))
            is_injective = len(tokens.unique()) == len(tokens)
            exist = 0 <= tokens.min() <= tokens.max() < self.config.vocabulary_size
            if not is_injective or not exist:
                place = self.settings.repository
                raise RunError(f"draft: d2t of {place} is no map into the target's vocabulary")
        placed = {}
        for name in module.state_dict():
            tensor = state[name]
            placed[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        module.load_state_dict(placed, assign=True)
        # Buffers that no checkpoint holds, such as a rotary embedding's, are elsewhere.
        return module.to(device).eval().requires_grad_(False)


def read_head(
    settings: ModelSettings,
    target: Checkpoint,
    kinds: Iterable[HeadKind],
    *,
    layers: Sequence[int] | None = None,
    weights: bool = True,
) -> HeadCheckpoint | None:
    """Return the head that a repository holds; None where it holds no head, or nothing that can be
    read.

    Args:
        target: the model that the head must match.
        kinds: the kinds of heads that are known.
        layers: `draft.layers`, as `StoredHead.layers`.
        weights: False for random weights: the configuration alone then says which tensors the head
            has.

    Raises:
        SettingError: a head for another target, in a format that is not known completely, or with
            other tensors.
        RunError: weights that cannot be fetched.
    """
    # Random weights of a preset need no download: its own architecture is enough.
    preset = None if weights else settings.architecture
    raw = dict(preset) if preset else read_configuration(settings)
    stored = StoredHead(settings, target, raw, layers)
    kind = next((kind for kind in kinds if raw and kind.recognises(raw)), None)
    if kind is None:
        if stated := raw.get("speculators_model_type"):
            raise stored.refused(f"is a speculators head of type {stated}, which is not supported")
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else "ForCausalLM"
        is_model = hasattr(transformers, name) or name.endswith(("ForCausalLM", "LMHeadModel"))
        if not is_model and not settings.trust_remote_code:
            raise stored.refused(f"is a {name}: no head that is known here, and no model")
        if raw and layers is not None:
            rule = f"is for heads and early_exit, and draft={settings.name} is a model"
            raise SettingError("draft.layers", rule, tuple(layers))
        return None
    if settings.quantization != "none":
        raise SettingError("draft.quantization", "must be none for a head", settings.quantization)
    files = find_weights(settings, kind) if weights else ()
    tensors = read_tensors(settings, files, "meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        config = kind.config(stored, shapes if weights else None)
    except SettingError:
        raise
    # Whatever values of other types raise.
    except Exception as error:
        raise unbuildable(settings, kind, error) from error
    head = HeadCheckpoint(kind, settings, config, files)
    if weights:
        _check_tensors(head, tensors)
    return head


def unbuildable(settings: ModelSettings, kind: HeadKind, error: Exception) -> SettingError:
    """Return the error for a configuration that no head of a kind can have."""
    cause = f"{type(error).__name__}: {first_line(error)}"[:200]
    rule = f"has a config.json from which no {kind.name} head can be built ({cause})"
    return SettingError("draft", rule, settings.name)


def _check_tensors(head: HeadCheckpoint, stored: Mapping[str, Tensor]) -> None:
    """Raise a SettingError unless the stored tensors are those of the module."""
    module = head.build()
    tensors = dict(stored)
    if module.d2t is None:
        tensors.pop("d2t", None)
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        # "Error(s) in loading state_dict for EagleHead:", and a line for each.
        _, _, causes = str(error).partition("\n")
        rule = f"holds no {head.kind.name} head: {' '.join(causes.split())[:300]}"
        raise SettingError("draft", rule, head.settings.name) from None


@dataclass(frozen=True)
class DraftPlan:
    """A draft before any weights load: which checkpoint or head it is, and what it shares with its
    target. `Method.plan` makes it; placing and loading read it. One that needs no weights, as
    `lookup`, has settings alone.

    Attributes:
        settings: the draft's, in which the plan has filled in what the user left open.
        checkpoint: the draft model, where it has weights of its own.
        head: the draft head, which reads the target's hidden states.
        shares_target: whether the draft is the target itself.
        mask_token: the token in place of those not drawn yet, of a model that drafts all tokens in
            one pass (`parallel`).
    """

    settings: DraftSettings
    checkpoint: Checkpoint | None = None
    head: HeadCheckpoint | None = None
    shares_target: bool = False
    mask_token: int | None = None
