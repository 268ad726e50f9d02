"""Draft heads before and after their weights load: which repositories are heads, of which kind, and
for which target.

`read_head` decides that from a repository's config.json and the names and shapes of its tensors;
its `HeadCheckpoint` is planned with (`sketch`), and later loads the module (`load`). A head must
match its target exactly, down to the shape of every tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from harness.config.errors import HarnessError, RunError
from harness.config.failures import first_line
from harness.config.settings import ModelSettings, require
from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.head import Head, HeadConfig
from harness.local.drafting.heads.medusa import Medusa
from harness.local.drafting.heads.stored import (
    StoredHead,
    find_weights,
    read_configuration,
    read_tensors,
)
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.random_weights import RandomTensor
from harness.local.models.sketch import Sketch, TensorSketch

# By the names of `StoredHead.kind`. Other kinds are measured with the servers that run them.
KINDS: dict[str, type[Head]] = {
    "eagle3": Eagle3,
    "dflash": DFlash,
    "dspark": DFlash,
    "medusa": Medusa,
}


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head before its weights load.

    Attributes:
        kind: its class.
        settings: the draft's, as the user gave them.
        config: its sizes and options, checked against the target.
        files: the files with its tensors; empty for random weights.
    """

    kind: type[Head]
    settings: ModelSettings
    config: HeadConfig
    files: tuple[Path, ...] = ()

    def build(self) -> Head:
        """Build the module, without memory for its weights."""
        # Each kind is made of its configuration alone, unlike `Head`, which the type names.
        make_head: type = self.kind
        with torch.device("meta"):
            head: Head = make_head(self.config)
            return head

    def sketch(self, dtype: torch.dtype) -> Sketch:
        """Return its sizes.

        What the head borrows of the target counts as bytes that a pass reads: the output matrix. It counts as memory
        where the head is on another device (`copied_tensors`): both matrices.
        """
        head = self.build()
        config = self.config
        tensors = tuple(head.sketches())
        matrix_size = config.target_size * config.vocabulary_size
        num_missing = (not config.own_embedding) + (not config.own_output)
        copies = TensorSketch(num_missing * matrix_size, read_per_token=0.0)
        borrowed = TensorSketch(head.num_outputs_borrowed * matrix_size)
        return Sketch(
            role="draft",
            settings=self.settings,
            dtype=dtype,
            tensors=tensors,
            caches=tuple(head.caches()),
            num_parameters=sum(tensor.count for tensor in tensors if tensor.itemsize is None),
            vocabulary_size=config.vocabulary_size,
            is_head=True,
            borrowed_tensors=(borrowed,),
            copied_tensors=(copies,),
            drafts_in_one_pass=head.one_pass,
        )

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """Return the head on a device.

        Args:
            dtype: of the target's hidden states.
            target: lends what the head lacks; None for a head that is not to draft.

        Raises:
            RunError: a file that cannot be read; a d2t (see `Head`) that names a token twice, or one
                that does not exist.
        """
        head = self.build()
        if self.files:
            state = read_tensors(self.settings, self.files, "cpu")
        else:
            # The same random weights in every run and process.
            state = {}
            for name, tensor in head.state_dict().items():
                seeded = f"{self.settings.repository} {self.kind.name} {name}"
                state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
                if tensor.is_floating_point():
                    state[name] = RandomTensor(seeded, tensor.shape, torch.float32, "cpu")[...]
        if head.d2t is not None:
            state["d2t"] = state["d2t"].long()
            tokens = state["d2t"] + torch.arange(len(state["d2t"]))
            exist = 0 <= tokens.min() <= tokens.max() < self.config.vocabulary_size
            if not exist or len(tokens.unique()) < len(tokens):
                place = self.settings.repository
                raise RunError(f"draft: d2t of {place} is no map into the target's vocabulary")
        placed = {}
        for name in head.state_dict():
            tensor = state[name]
            placed[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        head.load_state_dict(placed, assign=True)
        return ready(head, device, target)


def ready(head: Head, device: torch.device, target: PreTrainedModel | None) -> Head:
    """Return a head with its weights for drafting."""
    # Buffers that no checkpoint holds, such as a rotary embedding's, were made on the CPU.
    head.to(device).eval().requires_grad_(False)
    if target is not None:
        head.borrow(target)
    return head


def read_head(
    settings: ModelSettings,
    target: Checkpoint,
    *,
    layers: Sequence[int] | None = None,
    weights: bool = True,
) -> HeadCheckpoint | None:
    """Return the head that a repository holds; None where it holds no head, or nothing that can be
    read.

    Args:
        target: the model that the head must match.
        layers: `draft.layers`, as `StoredHead.chosen_layers`.
        weights: False where none are read, of random ones or a pair on paper: the configuration alone then says which
            tensors the head has.

    Raises:
        SettingError: a head for another target, of an unknown kind, or with other tensors.
        RunError: weights that cannot be fetched.
    """
    # Random weights of a preset need no download: its own architecture is enough.
    preset = None if weights else settings.architecture
    raw = dict(preset) if preset else read_configuration(settings)
    stored = StoredHead(settings, target, raw, layers)
    try:
        kind = _kind(stored)
        if kind is None:
            _check_model(stored)
            return None
        return _checked_head(kind, stored, weights)
    except HarnessError:
        raise
    # Values of other types, and what the layers of transformers refuse, raise anything.
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"[:200]
        rule = f"has a config.json from which no head can be built ({cause})"
        raise stored.refused(rule) from error


def _kind(stored: StoredHead) -> type[Head] | None:
    """Return the kind of a head; None for what is no head of a kind in `KINDS`."""
    # SpecForge names its kinds so: EdsdDraftModel, which has EAGLE-3's settings.
    names = str(stored.raw.get("architectures")).lower()
    is_other = "draftmodel" in names and not any(known in names for known in KINDS)
    if is_other and not stored.is_speculators:
        return None
    return KINDS.get(stored.kind or "")


def _checked_head(kind: type[Head], stored: StoredHead, weights: bool) -> HeadCheckpoint:
    """Return a head of this kind. Raises SettingError or RunError as `read_head`."""
    settings = stored.settings
    rule = "must be none for a head"
    require(settings.quantization == "none", "draft.quantization", rule, settings.quantization)
    rule = "is for draft models: a head computes in the model's format (model.dtype)"
    require(settings.dtype is None, "draft.dtype", rule, settings.dtype)
    files: tuple[Path, ...] = ()
    if weights:
        files = find_weights(settings, kind.weight_files)
        tensors = read_tensors(settings, files, "meta")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        stored = dataclasses.replace(stored, shapes=shapes)
    head = HeadCheckpoint(kind, settings, kind.config_type(**kind.fields(stored)), files)
    # Layers of a size that cannot be are refused here, of random weights too.
    module = head.build()
    if not weights:
        return head
    # A head with the target's whole vocabulary may be stored with a d2t all the same.
    if module.d2t is None:
        tensors.pop("d2t", None)
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        # "Error(s) in loading state_dict for Eagle3:", and a line for each.
        _, _, causes = str(error).partition("\n")
        causes = " ".join(causes.split())[:300]
        raise stored.refused(f"holds no {kind.title} head: {causes}") from None
    return head


def _check_model(stored: StoredHead) -> None:
    """Raise a SettingError for what is neither a head nor a model, and for what only servers run."""
    if stored.kind not in (None, *KINDS):
        raise stored.refused(
            f"is a draft of kind {stored.kind}, measured with the server that runs it: harness latency -- COMMAND"
        )
    names = stored.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else "ForCausalLM"
    is_model = hasattr(transformers, name) or name.endswith(("ForCausalLM", "LMHeadModel"))
    if not is_model and not stored.settings.trust_remote_code:
        raise stored.refused(f"is a {name}: no head that is known here, and no model")
