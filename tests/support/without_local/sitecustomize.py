"""Makes an interpreter, and those it starts, one without the packages of `specharness[local]`: its directory goes first
in their PYTHONPATH."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

ABSENT = {
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
}


class Refuses:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Refuses)
