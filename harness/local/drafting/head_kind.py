"""The record of a kind of draft head: how it is recognised and built.

A kind is a subclass of `HeadKind` in a file of `local/drafting/kinds/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.errors import SettingError
from harness.config.registry import Record

if TYPE_CHECKING:
    from harness.local.drafting.heads.blocks import HeadConfig
    from harness.local.drafting.heads.formats import Shapes, StoredHead


# The rule about `draft` with transformers' own generation.
FOR_HUGGINGFACE = (
    "must be a model, a DFlash head, mtp, lookup or early_exit with engine=huggingface"
)


class HeadKind(Record):
    """One kind of head on the target's hidden states.

    Attributes:
        name: as speculators and vLLM call it.
        head_class: the subclass of `Head` that is made of what `config` returns.
        one_pass: whether one forward pass of the head drafts all tokens.
        weight_files: names of files with its weights, in the order in which they are looked for.
    """

    head_class: ClassVar[Any]
    one_pass: ClassVar[bool] = True
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Whether a stored configuration describes a head of this kind."""
        raise NotImplementedError

    def config(self, stored: StoredHead, shapes: Shapes | None) -> HeadConfig:
        """The configuration, checked against the target, `stored.target`.

        Args:
            stored: the configuration as it is stored, with the user's settings and the target.
            shapes: of the stored tensors, by their names; None where no weights are needed.

        Raises:
            SettingError: for another target, or a format that is not known completely.
        """
        raise NotImplementedError

    def check_huggingface(self, config: Any, draft: str, num_draft_tokens: int) -> None:
        """Raise a SettingError if `generate` cannot draft with a head of this configuration, or
        not so many tokens; `Head.huggingface` is called otherwise.

        Args:
            draft: the head as the user typed it.
        """
        raise SettingError("draft", FOR_HUGGINGFACE, draft)
