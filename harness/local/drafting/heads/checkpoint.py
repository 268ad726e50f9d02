"""Recognises the repositories that hold draft heads, checks a head against its target, and loads it.

`read_head` recognises the kind of a head by the repository's config.json, and returns a `HeadCheckpoint`. Planning
needs the sizes of its weights and caches (`HeadCheckpoint.sketch`). Later, `HeadCheckpoint.load` loads the module. A
head must match its target exactly, down to the shape of every tensor.
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

# The kinds of heads that this program can run. The keys are names that `StoredHead.kind` returns. All other kinds can
# only be measured with a server that runs them.
KINDS: dict[str, type[Head]] = {
    "eagle3": Eagle3,
    "dflash": DFlash,
    "dspark": DFlash,
    "medusa": Medusa,
}


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head whose weights are not loaded yet.

    Attributes:
        kind: the head's class.
        settings: the draft's settings, as the user gave them. (For an MTP layer: its name, with the target's
            repository.)
        config: the head's sizes and options, checked against the target.
        files: the files with the head's tensors; empty for random weights, and for a pair that is only planned.
    """

    kind: type[Head]
    settings: ModelSettings
    config: HeadConfig
    files: tuple[Path, ...] = ()

    def build(self) -> Head:
        """Build the module on the meta device, where its weights take no memory."""
        # The constructors of the kinds take a configuration only. That of `Head`, the annotated class, also takes a
        # width, so that the type checker would refuse this call.
        make_head: type = self.kind
        with torch.device("meta"):
            return make_head(self.config)

    def sketch(self, dtype: torch.dtype) -> Sketch:
        """Return the sizes of the head's weights and caches.

        A head without an output matrix of its own reads the target's output matrix in each pass (`borrowed_tensors`).
        If the head is on another device than the target, it has copies of those matrices that it lacks: the embedding,
        the output matrix or both (`copied_tensors`). Otherwise the target's matrices cost the head no memory.
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
            block_size=getattr(config, "block_size", 0),
        )

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """Load the head onto a device.

        Args:
            dtype: the dtype of the target's hidden states, and so of the head's weights.
            target: the model whose embedding and output matrix the head uses if it lacks its own; None for a head that
                will not draft.

        Raises:
            SettingError: a setting of the draft, such as its revision, is wrong.
            RunError: a file cannot be read, or `d2t` (see `Head`) maps two tokens to one, or a token to one that does
                not exist.
        """
        head = self.build()
        if self.files:
            state = read_tensors(self.settings, self.files, "cpu")
        else:
            # Random weights are made from a seed, so that they are the same in every run and process.
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
                repository = self.settings.repository
                raise RunError(f"draft: d2t of {repository} is no map into the target's vocabulary")
        placed = {}
        for name in head.state_dict():
            tensor = state[name]
            placed[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        head.load_state_dict(placed, assign=True)
        return ready(head, device, target)


def ready(head: Head, device: torch.device, target: PreTrainedModel | None) -> Head:
    """Prepare a head for drafting, after its weights were loaded: move the rest of it to the device, and give it the
    target's embedding and output matrix if it lacks its own. Returns the same head.

    Args:
        target: as for `HeadCheckpoint.load`; if None, the head gets no matrices and cannot draft.
    """
    # Buffers that are not stored in checkpoints, such as a rotary embedding's, are still on the CPU: heads compute them
    # there, while everything else is built on the meta device.
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
    """Return the head that a repository holds; None if the repository holds a draft model, or if its config.json cannot
    be read.

    Args:
        target: the model that the head must match.
        layers: `draft.layers`, as for `StoredHead.chosen_layers`.
        weights: whether the stored weights are read. Pass False for random weights, and for a pair that is only
            planned. Then the configuration alone determines the head's tensors.

    Raises:
        SettingError: the head does not fit the target or the settings; this kind of head does not run here; the stored
            tensors do not match the configuration; or the repository holds no usable head or model.
        RunError: the weights cannot be fetched or read.
    """
    # If weights are random and a preset states the head's architecture, nothing is downloaded.
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
    # A field of the wrong type, or a value that transformers' layers refuse, can raise any exception.
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"[:200]
        rule = f"has a config.json from which no head can be built ({cause})"
        raise stored.refused(rule) from error


def _kind(stored: StoredHead) -> type[Head] | None:
    """Return the class of a head; None if the repository holds no head, or a head that does not run here."""
    # speculators has a field for the kind of a head. SpecForge states the kind only in `architectures`. SpecForge's
    # EdsdDraftModel has the fields of EAGLE-3, but is another kind of head, which does not run here.
    names = str(stored.raw.get("architectures")).lower()
    is_other = "draftmodel" in names and not any(known in names for known in KINDS)
    if is_other and not stored.is_speculators:
        return None
    return KINDS.get(stored.kind or "")


def _checked_head(kind: type[Head], stored: StoredHead, weights: bool) -> HeadCheckpoint:
    """Return the checkpoint of a head of this kind, after checking the head against its target and its stored tensors.

    Raises SettingError or RunError for the reasons that `read_head` lists.
    """
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
    # Impossible sizes of layers raise an exception here. Therefore the module is built for random weights too.
    module = head.build()
    if not weights:
        return head
    # A head that drafts from the target's whole vocabulary needs no d2t, but d2t may be stored with it.
    if module.d2t is None:
        tensors.pop("d2t", None)
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        # The message begins with the line "Error(s) in loading state_dict for Eagle3:"; each further line is one error.
        _, _, causes = str(error).partition("\n")
        causes = " ".join(causes.split())[:300]
        raise stored.refused(f"holds no {kind.title} head: {causes}") from None
    return head


def _check_model(stored: StoredHead) -> None:
    """Raise a SettingError if only servers can run this draft, or if the repository holds neither a head nor a model.

    A class name that is not in transformers is accepted if it ends as a language model's does, or if the user trusts
    the repository's code.
    """
    if stored.kind not in (None, *KINDS):
        how = "which can only be measured with a server that runs it: harness latency -- COMMAND"
        raise stored.refused(f"is a draft of kind {stored.kind}, {how}")
    names = stored.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else "ForCausalLM"
    is_model = hasattr(transformers, name) or name.endswith(("ForCausalLM", "LMHeadModel"))
    if not is_model and not stored.settings.trust_remote_code:
        raise stored.refused(f"is a {name}: no head that is known here, and no model")
