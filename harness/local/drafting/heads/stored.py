"""Reads published heads: the fields of their configuration, and the files with their weights.

Heads are read in the formats of these projects:

    speculators         every kind of head that runs here
    SafeAILab           EAGLE-3
    z-lab               DFlash, and DSpark as SpecForge stores it
    DeepSpec            EAGLE-3, DFlash, DSpark
    Medusa's authors    Medusa

transformers has a DFlash format of its own, whose configuration is converted to z-lab's format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_utils import load_state_dict
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.utils.hub import cached_file

from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.failures import explained, first_line
from harness.config.settings import ModelSettings
from harness.local.models.checkpoints import (
    INDICES,
    Checkpoint,
    check_model_access,
    weight_map,
)
from harness.local.models.tokenizers import vocabulary_size

# The layer classes that heads use, by transformers' model type.
LAYER_STYLES: dict[str, type[nn.Module]] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}

# Tensors are ignored if their names contain one of these strings:
# - t2d, [target vocabulary] bool, marks the target's tokens that the head can draft. d2t shows them too (see `Head`).
# - The verifier's tensors are copies of the target's tensors, which were stored for training.
# - rotary_emb is computed from the configuration.
# - DSpark's confidence head estimates how probable it is that a draft token is accepted. Servers use it to shorten
#   proposals; this program does not.
_UNUSED = ("t2d", "verifier_lm_head", "verifier_norm", "rotary_emb", "confidence_head")
# Names of the field that holds the mask token of a PARD model, a draft model that drafts all tokens in one pass. vLLM
# looks for them in this order.
_PARALLEL_KEYS = ("pard_token", "ptd_token_id")
# The model type of transformers' own DFlash.
_TRANSFORMERS_DFLASH = "muse_glimmer_assistant"
# Parts of stored tensor names, and the parts that replace them.
_RENAMED = (
    # transformers' own DFlash
    ("encoder.fc.weight", "fc.weight"),
    ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
    # the only layer of SafeAILab's EAGLE-3
    ("midlayer.", "layers.0."),
    # a prefix of the tensors that correct logits, in early heads of SpecForge
    ("logit_head.", ""),
)


@dataclass(frozen=True)
class StoredHead:
    """A head's configuration as it is stored, and the target that the head must match.

    Attributes:
        settings: the draft's settings, as the user gave them.
        target: the checkpoint of the model that the head must match.
        raw: the contents of config.json, as `read_configuration` returns them. If no weights are read and a
            preset states the architecture, that takes their place.
        chosen_layers: the setting `draft.layers`, which lists the target's hidden states that the head reads: 0 is the
            embedding, i the output of layer i. None if the head reads the layers that its configuration names.
        shapes: the shapes of the stored tensors, under the names of the head's modules. None if no weights are read;
            then the configuration determines the tensors.
    """

    settings: ModelSettings
    target: Checkpoint
    raw: Mapping[str, Any]
    chosen_layers: Sequence[int] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @cached_property
    def named(self) -> dict[str, Any]:
        """The fields of the configuration and of its sections `eagle_config` and `dflash_config`, in one dictionary.

        A section's field replaces a field of the same name outside it. Fields that are null are left out. Other
        sections stay nested.
        """
        nested = [self.raw.get(key) or {} for key in ("eagle_config", "dflash_config")]
        named: dict[str, Any] = {}
        for fields in (self.raw, *nested):
            named |= {key: value for key, value in fields.items() if value is not None}
        return named

    def required(self, key: str) -> Any:
        """Return the value of a field that the head needs. Raises SettingError if the field is missing or null."""
        if key not in self.named:
            raise self.refused(f"does not state {key} in its config.json")
        return self.named[key]

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.raw

    @property
    def is_deepspec(self) -> bool:
        # z-lab has this field too, but inside its section `dflash_config`.
        return "target_layer_ids" in self.raw

    @property
    def kind(self) -> str | None:
        """The kind of head that the fields of the configuration show; None if they show none.

        Kinds that can run here are keys of `checkpoint.KINDS`. Other kinds, such as `EAGLE`, and PARD, which is a
        draft model and no head, get a name only for the message that refuses them. The kind alone does not decide
        whether a head can run: `checkpoint._kind` also looks at the class name in `architectures`. (EdsdDraftModel has
        EAGLE-3's fields, so its kind here is `eagle3`, but it is refused.)

        The order of the conditions matters, because several kinds share field names.
        """
        named = self.named
        if self.is_speculators:
            kind = str(self.raw["speculators_model_type"])
            return "P-EAGLE" if kind == "eagle3" and "mask_token_id" in named else kind
        if "dflash_config" in self.raw or (self.is_deepspec and "block_size" in named):
            if "selector_rank" in named:
                return "DFlash 2"
            if named.get("projector_type") == "domino":
                return "Domino"
            if named.get("markov_rank") or named.get("enable_confidence_head"):
                return "dspark"
            return "JetSpec" if named.get("causal_head") else "dflash"
        if "medusa_num_heads" in named or named.get("model_type") == "medusa":
            return "medusa"
        names = str(named.get("architectures")).lower()
        # vLLM calls P-EAGLE heads EAGLE-3 too, but only P-EAGLE heads have a mask token.
        if "peagle" in names or ("eagle3" in names and "mask_token_id" in named):
            return "P-EAGLE"
        if "eagle3" in names or "draft_vocab_size" in named:
            return "eagle3"
        if any(key in named for key in _PARALLEL_KEYS):
            return "PARD"
        # The configurations of EAGLE-1 and 2 do not state a kind. They are recognised by a field `bias` and one layer.
        is_eagle = "bias" in named and named.get("num_hidden_layers") == 1
        return "EAGLE" if is_eagle else None

    def sizes(self, usual_layers: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `HeadConfig` with the target's sizes, and with the layers that the head reads.

        Args:
            usual_layers: the target's hidden states that the head reads if the user chose none (`chosen_layers`).

        Raises:
            SettingError: the target has no such layer.
        """
        text_config = self.target.config.get_text_config(decoder=True)
        layers = tuple(usual_layers if self.chosen_layers is None else self.chosen_layers)
        for layer in layers:
            if not 0 <= layer <= text_config.num_hidden_layers:
                raise self.refused(
                    f"reads layer {layer}; {self._target_name} has {text_config.num_hidden_layers}"
                )
        vocabulary = vocabulary_size(text_config)
        return {
            "target_layers": layers,
            "target_size": text_config.hidden_size,
            "vocabulary_size": vocabulary,
            "draft_vocabulary_size": vocabulary,
        }

    def layered(
        self, usually_stored: Collection[str], num_layers: int | None = None
    ) -> dict[str, Any]:
        """Return the fields of `HeadConfig` for a head with transformer layers, after checking them against the target.

        Both arguments are used only if `shapes` is None. Otherwise the stored tensors show the same facts.

        Args:
            usually_stored: which of the matrices `embed_tokens` and `lm_head` this format stores.
            num_layers: the head's number of layers; None for the number in its configuration.

        Raises:
            SettingError: the head was made for another target, or a setting of its configuration is not supported.
        """
        named = self.named
        text_config = self.target.config.get_text_config(decoder=True)
        fields = self.sizes(self._layer_ids(text_config.num_hidden_layers))
        stored = usually_stored
        if self.shapes is not None:
            stored = [name.removesuffix(".weight") for name in self.shapes]
            # The stored layers are counted, because some heads' configurations state the target's number of layers.
            num_layers = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
        layer_config = self._transformer(num_layers)
        size = fields["vocabulary_size"]
        for what, made_for, present in (
            ("hidden size", named.get("target_hidden_size", layer_config.hidden_size), text_config.hidden_size),
            ("vocabulary size", layer_config.vocab_size, size),
            ("number of layers", named.get("num_target_layers"), text_config.num_hidden_layers),
        ):  # fmt: skip
            # None: the configuration does not state this number.
            if made_for not in (None, present):
                raise self.refused(
                    f"is a head for a model of {what} {made_for}; {self._target_name} has {present}"
                )
        draft_size = named.get("draft_vocab_size", size)
        # A head whose states have another width than the target's cannot use the target's matrices.
        differs_in_size = layer_config.hidden_size != text_config.hidden_size
        return fields | {
            "draft_vocabulary_size": draft_size,
            "own_embedding": "embed_tokens" in stored or differs_in_size,
            "own_output": "lm_head" in stored or differs_in_size or draft_size != size,
            "transformer": layer_config,
        }

    def _layer_ids(self, num_layers: int) -> list[int]:
        """Return the target's hidden states that the head reads if the user chose none: 0 for the embedding, i for the
        output of layer i. If the user chose layers, the result is not used.

        In `target_layer_ids`, z-lab and DeepSpec number the layers from 0. The output of their layer 0 is hidden state
        1 here, so their [1, 9] becomes [2, 10].

        Raises:
            SettingError: the head reads no hidden states of inner layers; or it is no EAGLE-3 head, and neither the
                configuration nor the user names layers.
        """
        named = self.named
        if named.get("use_aux_hidden_state") is False:
            rule = "reads no hidden states of inner layers (use_aux_hidden_state: false)"
            raise self.refused(f"{rule}, which is not supported")
        for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            if named.get(key):
                return list(named[key])
        if "target_layer_ids" in named:
            return [layer + 1 for layer in named["target_layer_ids"]]
        if self.chosen_layers is None and self.kind != "eagle3":
            raise self.refused("does not state target_layer_ids: set draft.layers=[...]")
        # The default layers of EAGLE-3, in its authors' code and in vLLM.
        return [2, num_layers // 2, num_layers - 3]

    def _transformer(self, num_layers: int | None) -> PreTrainedConfig:
        """Return the configuration of the head's own layers.

        Args:
            num_layers: the number of layers, which replaces the stored number. (transformers derives other fields from
                it, so it is replaced before the configuration is built.) None or 0 keeps the stored number.

        Raises:
            SettingError: the layers are of a type that is not in `LAYER_STYLES`.
        """
        nested = self.raw.get("transformer_layer_config")
        raw = nested or self.raw
        # If the configuration states no model type, layers are Qwen3's in speculators' format, and Llama's elsewhere.
        style = raw.get("model_type") or ("qwen3" if nested else "llama")
        if style not in LAYER_STYLES:
            supported = ", ".join(sorted(LAYER_STYLES))
            raise self.refused(f"has layers of type {style}; supported are {supported}")
        size = vocabulary_size(self.target.config)
        fields = {"vocab_size": size, **raw, "model_type": style}
        if num_layers:
            fields["num_hidden_layers"] = num_layers
            # If the stored list is too short for the layers, transformers derives their types.
            kinds = fields.pop("layer_types", None) or ()
            if len(kinds) >= num_layers:
                fields["layer_types"] = kinds[:num_layers]
        return AutoConfig.for_model(**fields)

    @property
    def _target_name(self) -> str:
        return f"model={self.target.settings.name}"

    def refused(self, rule: str) -> SettingError:
        """Return the error to raise for a head that breaks a rule."""
        return SettingError("draft", rule, self.settings.name)


def read_configuration(settings: ModelSettings) -> dict[str, Any]:
    """Return the contents of the repository's config.json; {} if there is none, or if it cannot be fetched or read.

    {} is not a head's configuration. The caller then reads the draft as a model (`read_checkpoint`), and that function
    reports to the user why the file cannot be fetched or read.
    """
    try:
        check_model_access(settings)
        path = fetch(settings, "config.json")
        content: Any = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        is_transformers_dflash = content.get("model_type") == _TRANSFORMERS_DFLASH
        return _as_z_lab_stores(content) if is_transformers_dflash else dict(content)
    except Exception:
        return {}


def _as_z_lab_stores(content: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of transformers' own DFlash in z-lab's format.

    Removes from `content` the fields that move into `dflash_config`.
    """
    nested = {key: content.pop(key) for key in ("target_layer_ids", "mask_token_id")}
    window = content.get("sliding_window")
    return content | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        # transformers counts the tokens on each side of a query, without the query. z-lab counts the tokens up to the
        # query, including the query.
        "sliding_window": window and window + 1,
        # `DFlash.fields` reads `causal`. With False, a query of a block also sees the queries after it, in layers with
        # a sliding window too.
        "dflash_config": nested | {"causal": False},
    }


@contextmanager
def reading(settings: ModelSettings, role: str, name: str) -> Iterator[None]:
    """Turn the exceptions of a block that reads a repository's file into errors for the user.

    Args:
        role: `draft` or `model`, for the message.
        name: the file's name, for the message.

    Raises:
        SettingError: a setting of the model is wrong, for example its revision.
        RunError: the file cannot be fetched or loaded. If `failures.explain` does not know the exception (it knows
            those of the hub, and every OSError, ValueError, ImportError and RuntimeError), the message says that the
            file is damaged.
        KeyboardInterrupt: Ctrl-C was the cause of the exception.
    """
    try:
        yield
    except Exception as exception:
        error = explained(exception, role, settings)
        # `explained` returns the exception itself if it does not know it. Our own errors need no explanation.
        if error is exception and not isinstance(error, HarnessError):
            cause = first_line(exception)
            error = RunError(f"{role}: {name} of {settings.repository} is damaged ({cause})")
        raise error from exception


def fetch(settings: ModelSettings, name: str) -> Path | None:
    """Return the path of a repository's file, after downloading it if necessary; None if the repository has no such
    file. Raises an exception of the hub's client if the repository cannot be reached.
    """
    path = cached_file(
        settings.repository,
        name,
        revision=settings.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if path is None else Path(path)


def find_weights(settings: ModelSettings, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the files with a head's tensors.

    If the repository has an index of several files (`INDICES`), all files of the index are returned. Otherwise the
    result is the first file of `names` that exists.

    Raises:
        SettingError: the repository has none of these files, or a setting such as the revision is wrong.
        RunError: a file cannot be fetched or read, or the index names a file that is missing.
    """
    for name in (*INDICES, *names):
        with reading(settings, "draft", name):
            path = fetch(settings, name)
            if path is None:
                continue
            if name not in INDICES:
                return (path,)
            shards = []
            for shard in sorted(set(weight_map(path).values())):
                if (file := fetch(settings, shard)) is None:
                    # `reading` turns this into a RunError.
                    raise FileNotFoundError(f"lacks {shard}, which {name} names")
                shards.append(file)
            return tuple(shards)
    raise SettingError("draft", f"holds no weights ({', '.join(names)})", settings.name)


def read_tensors(
    settings: ModelSettings, files: Sequence[Path], device: Literal["cpu", "meta"]
) -> dict[str, Tensor]:
    """Return the tensors of these files, under the names that the head's modules have. Tensors that no head needs
    (`_UNUSED`) are left out.

    Args:
        device: with `meta`, the tensors have shapes and dtypes, but take no memory.

    Raises:
        SettingError: a setting such as the revision is wrong.
        RunError: a file cannot be read, or does not map names to tensors.
    """
    used: dict[str, Tensor] = {}
    for file in files:
        with reading(settings, "draft", file.name):
            for name, tensor in load_state_dict(file, map_location=device).items():
                if not isinstance(tensor, Tensor):
                    # `reading` turns this into a RunError.
                    raise TypeError("it holds no tensors by name")
                if any(unused in name for unused in _UNUSED):
                    continue
                for theirs, ours in _RENAMED:
                    name = name.replace(theirs, ours)
                used[name] = tensor
    return used
