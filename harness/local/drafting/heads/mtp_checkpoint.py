"""Multi-token-prediction layers: whether a target's own checkpoint has any, their sizes, and their
weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from harness.config.errors import SettingError
from harness.config.failures import explained
from harness.config.settings import ModelSettings, require
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.heads.find import HeadCheckpoint
from harness.local.drafting.heads.head_files import fetch, read_weight_map
from harness.local.drafting.heads.mtp import MtpHead
from harness.local.drafting.heads.slot_cache import SPARE_SLOTS, SlotCache
from harness.local.drafting.kinds.eagle3 import EagleConfig
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.meta import bare_model, own_tensors, sketch_tensor
from harness.local.models.quantization import stored_quantization
from harness.local.models.random_weights import RandomTensor
from harness.local.models.sketch import Block, LayerCache, Sketch
from harness.local.models.tokenizers import vocabulary_size

# Types of targets of which transformers knows the MTP layer's tensors but not its number, and what
# their configurations call that.
_NUMBER_OF_LAYERS = {
    "qwen3_next": "mtp_num_hidden_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
}


class Mtp(HeadKind):
    """Layers in the target's own checkpoint, which no repository of heads holds."""

    name = "mtp"

    def check_huggingface(self, config: EagleConfig, draft: str, num_draft_tokens: int) -> None:
        assert config.transformer is not None
        num_layers = config.transformer.num_hidden_layers
        rule = f"must be at most {num_layers} with engine=huggingface: {draft} has a layer for each"
        require(num_draft_tokens <= num_layers, "decoding.num_draft_tokens", rule, num_draft_tokens)


@dataclass(frozen=True, kw_only=True)
class MtpCheckpoint(HeadCheckpoint):
    """MTP layers before their weights load.

    Attributes:
        files: the index of the target's tensors, or its only file of them; its directory holds the
            weights. Empty for random weights.
    """

    target: Checkpoint
    config: EagleConfig

    def sketch(self, dtype: torch.dtype) -> Sketch:
        bare = bare_model(self.target, dtype)
        # Other implementations of experts look at numbers, which meta tensors lack.
        bare.set_experts_implementation("batched_mm")
        with init_empty_weights(include_buffers=True):
            model = MtpModel(bare, len(self.numbers))
        tensors = []
        # The embedding, the output matrix and the rotary embedding are the target's.
        for module_name, module in model.named_modules():
            if module_name.startswith(("layers", "shared_post_norm")):
                for name, tensor in own_tensors(module, module_name):
                    tensors.append(sketch_tensor(model, module, name, tensor, quantizable=False))
        num_layers = len(self.numbers)
        # A token that passes through each layer shows what all of them cache for one. Its contents
        # do not matter, so the same tensor stands for its embedding and for the target's state.
        cache = SlotCache()
        cache.num_slots = 1
        cache.place(torch.zeros(1, dtype=torch.long, device="meta"), 1)
        states = torch.zeros(1, 1, self.config.target_size, device="meta")
        head = MtpHead(self.config, model)
        for layer in range(num_layers):
            head(states, states, cache, layer)
        output_matrix_size = self.config.target_size * self.config.vocabulary_size
        # One layer drafts a chain, a pass for each token. Several draft one token each in a single
        # pass, and each reads the target's output matrix.
        return Sketch(
            role="draft",
            settings=self.settings,
            dtype=dtype,
            blocks=(Block(("",), tuple(tensors), (LayerCache("", cache.numbers_per_token),)),),
            num_parameters=sum(tensor.count for tensor in tensors),
            vocabulary_size=self.config.vocabulary_size,
            class_name=self.kind.name,
            spare_slots=SPARE_SLOTS,
            borrowed_bytes=dtype.itemsize * output_matrix_size * num_layers,
            drafts_in_one_pass=num_layers > 1,
        )

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> MtpHead:
        """`target` is the loaded model. Raises RunError for tensors that are missing."""
        assert target is not None
        # What transformers is to know of the layers goes into a shallow copy of the target.
        stand_in = copy.copy(target)
        stand_in.config = copy.copy(target.config)
        if self.files:
            # transformers takes their directory from the target's configuration. It finds their
            # tensors by the patterns of names that the target's class ignores, which are those of
            # one published depth (`layers.61`).
            stand_in.config.name_or_path = str(self.files[0].parent)
            stand_in._keys_to_ignore_on_load_unexpected = _patterns(type(stand_in), self.numbers)
            try:
                model = MtpModel.from_pretrained(stand_in, device_map={"": device})
            except Exception as exception:
                raise explained(exception, "draft", self.target.settings) from exception
            head = MtpHead(self.config, model)
        else:
            with torch.device("meta"):
                model = MtpModel(stand_in, len(self.numbers))
            head = MtpHead(self.config, model)
            # The same random weights in every run and process.
            state = {}
            place = "cpu" if device.index is None else device.index  # as `RandomTensor` takes it
            for name, tensor in head.state_dict().items():
                seeded = f"{self.target.settings.repository} mtp {name}"
                state[name] = RandomTensor(seeded, tensor.shape, dtype, place)[...]
            head.load_state_dict(state, assign=True)
        return head.to(device).eval().requires_grad_(False)

    @property
    def numbers(self) -> range:
        """Numbers of the layers in the checkpoint: of one behind 61 of the target range(61, 62), as
        in `model.layers.61`.
        """
        first = self.target.config.get_text_config(decoder=True).num_hidden_layers
        return range(first, first + self.config.transformer.num_hidden_layers)


def read_mtp(draft: str, target: Checkpoint, *, weights: bool = True) -> MtpCheckpoint:
    """Return the multi-token-prediction layers of a target.

    Args:
        draft: its name, for errors.
        weights: False with random weights: whether the checkpoint holds such layers is not checked.

    Raises:
        SettingError: a target without such layers, or with layers that transformers does not read.
        RunError: weights that cannot be fetched.
    """
    text_config = target.config.get_text_config(decoder=True)
    name_layers(text_config)
    size = vocabulary_size(text_config)
    # They draft as an EAGLE head does that reads the states after the target's last layer alone.
    config = EagleConfig(
        layers=(text_config.num_hidden_layers,),
        target_size=text_config.hidden_size,
        vocabulary_size=size,
        draft_vocabulary_size=size,
        transformer=_layers_config(draft, target),
    )
    settings = ModelSettings(name=draft, repository=target.settings.repository)
    checkpoint = MtpCheckpoint(kind=Mtp(), settings=settings, config=config, target=target)
    if not weights:
        return checkpoint
    file, names = _tensor_names(target)
    patterns = _patterns(MODEL_FOR_CAUSAL_LM_MAPPING[type(target.config)], checkpoint.numbers)
    if not any(re.search(pattern, name) for pattern in patterns for name in names):
        model = f"model={target.settings.name}"
        rule = f"needs multi-token-prediction layers, and the weights of {model} hold none"
        raise SettingError("draft", rule, draft)
    return replace(checkpoint, files=(file,))


def name_layers(text_config: Any) -> None:
    """Add the attributes by which transformers finds MTP layers whose number it does not read.

    Qwen3-Next and its successors store one attention layer as `mtp.layers.0`, with `mtp.fc`,
    `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.norm` beside it, which
    transformers renames. Qwen3-Next's configuration does not mention it. GLM-4.7 Flash has
    DeepSeek's layout.
    """
    setting = _NUMBER_OF_LAYERS.get(text_config.model_type)
    if setting is None:
        return
    number = 1 if text_config.model_type == "qwen3_next" else getattr(text_config, setting, 0)
    if number == 1:
        text_config.num_mtp_layers = number
        text_config.mtp_layer_types = ["full_attention"]
        text_config.mtp_mlp_layer_types = ["sparse"]


def _layers_config(draft: str, target: Checkpoint) -> PreTrainedConfig:
    """The configuration of a target's MTP layers. Raises SettingError where they cannot be used."""
    text_config = target.config.get_text_config(decoder=True)
    model = f"model={target.settings.name}"

    def refused(rule: str) -> SettingError:
        return SettingError("draft", rule, draft)

    if not getattr(text_config, "num_mtp_layers", None):
        lacks = "has none"
        if not hasattr(text_config, "num_mtp_layers"):
            lacks += f" that transformers {transformers.__version__} knows"
        kind = text_config.model_type
        raise refused(f"needs multi-token-prediction layers, and {model} ({kind}) {lacks}")
    is_gguf = target.settings.gguf_file is not None
    quantized = "GGUF" if is_gguf else stored_quantization(target.config)
    if quantized is not None:
        rule = f"needs weights that are not quantized, and those of {model} are ({quantized})"
        raise refused(rule)
    try:
        config = target.config.get_mtp_config()
    except ValueError as error:
        kind = text_config.model_type
        rule = f"cannot be used: transformers does not read such layers of {kind}"
        raise refused(rule) from error
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        kinds = ", ".join(sorted(unknown))
        raise refused(f"cannot be used: the layers of {model} are of type {kinds}")
    return config


def _tensor_names(target: Checkpoint) -> tuple[Path, Collection[str]]:
    """Return the file that names the tensors of a checkpoint, and these names."""
    settings = target.settings
    try:
        if (index := fetch(settings, "model.safetensors.index.json")) is not None:
            return index, read_weight_map(settings, "model", index)
        if (file := fetch(settings, "model.safetensors")) is not None:
            with safe_open(file, framework="pt") as stored:
                return file, list(stored.keys())
    except Exception as exception:
        raise explained(exception, "model", settings) from exception
    raise SettingError(
        "draft", f"needs weights as safetensors, and model={settings.name} has none", "mtp"
    )


def _patterns(model_class: Any, numbers: range) -> list[str]:
    """Patterns for the names of tensors in MTP layers: numbered ones, and those that the class
    names.
    """
    named = [
        pattern
        for pattern in model_class._keys_to_ignore_on_load_unexpected or ()
        if "mtp" in pattern
    ]
    return [*(rf"(^|\.)layers\.{number}\." for number in numbers), *named]
