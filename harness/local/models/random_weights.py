"""Models of random numbers: a checkpoint's architecture and quantization without its weights.

Times do not depend on the weights' values, so a pair can be measured before it can be downloaded.
Everything but the numbers is as in loading: transformers gets a state dict whose tensors are made,
each on its device, when it reads them. So the same code quantizes them, one at a time, and they are
never in memory all at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harness.config.errors import SettingError
from harness.config.run import WeightsSource
from harness.config.settings import ModelSettings
from harness.local.models.checkpoints import (
    Checkpoint,
    read_checkpoint,
    refuse_second_quantization,
    stored_quantization,
)
from harness.local.models.sketch import DeviceMap, bare_model, owning_module
from harness.local.models.tokenizers import check_vocabularies, vocabulary_size

# Most architectures start training with it.
_STANDARD_DEVIATION = 0.02


def checkpoint_for(role: str, settings: ModelSettings, weights: WeightsSource | None) -> Checkpoint:
    """A model for a run with such weights; None for a pair on paper, which needs none.

    With random ones a preset's own architecture or a configuration is enough. A repository whose
    weights are quantized by bitsandbytes is built as it would be quantized here.

    Raises SettingError or RunError as `read_checkpoint`, and for formats that random numbers cannot
    have.
    """
    if weights != "random":
        return read_checkpoint(role, settings, needs_weights=weights is not None)
    if settings.gguf_file is not None:
        rule = f"cannot be random for {role}={settings.name}: its format is GGUF"
        raise SettingError("weights", rule, "random")
    checkpoint = read_checkpoint(role, settings, needs_weights=False)
    stored: Any = stored_quantization(checkpoint.config)
    if stored is not None:
        if stored not in ("8bit", "4bit"):
            rule = f"cannot be random for {role}={settings.name}"
            reason = f"its weights are quantized with {stored}"
            raise SettingError("weights", f"{rule}: {reason}", "random")
        refuse_second_quantization(checkpoint)
        for config in (checkpoint.config, checkpoint.config.get_text_config(decoder=True)):
            if hasattr(config, "quantization_config"):
                del config.quantization_config
        settings = dataclasses.replace(settings, quantization=stored)
    return dataclasses.replace(checkpoint, settings=settings, random=True)


def random_tokenizer(
    target: Checkpoint, draft: Checkpoint | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer for text that nobody will read: a token for each byte, a name for every other id.

    Raises SettingError if the vocabularies differ by more than the padding within one family.
    """
    size = vocabulary_size(target.config)
    if draft is not None:
        check_vocabularies(target, draft)
        size = min(size, vocabulary_size(draft.config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), size))]
    vocabulary = {name: number for number, name in enumerate(names[:size])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_state(
    checkpoint: Checkpoint, device_map: DeviceMap, dtype: torch.dtype
) -> tuple[type[PreTrainedModel], dict[str, RandomTensor]]:
    """The class of the model, and a reproducible state dict for `from_pretrained`."""
    bare = bare_model(checkpoint, dtype)
    repository = checkpoint.settings.repository
    tensors = {}
    for name, tensor in bare.named_parameters():
        device = device_map[owning_module(name, device_map)]
        tensors[name] = RandomTensor(f"{repository} {name}", tensor.shape, tensor.dtype, device)
    return type(bare), tensors


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """A tensor that is made when it is indexed, as one in a safetensors file is read.

    Its name determines its numbers, independent of all other tensors.

    Attributes:
        device: a GPU's index, or `cpu`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: int | str

    def get_shape(self) -> list[int]:
        """The shape; safetensors' slices have this method."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        device = torch.device("cpu")
        if isinstance(self.device, int):
            device = torch.device("cuda", self.device)
        whole = torch.empty(self.shape, dtype=self.dtype, device=device)
        if len(self.shape) < 2:
            # Norms let everything pass, so that activations stay finite through any number of
            # layers.
            whole.fill_(0.0 if self.name.endswith("bias") else 1.0)
        else:
            seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8])
            generator = torch.Generator(device).manual_seed(seed)
            whole.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        part = whole[index]
        # A view would keep all of it.
        return part if part.shape == whole.shape else part.clone()
