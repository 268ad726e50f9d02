"""What the server has imported from which `forked` has its processes: what most commands need."""

import gc
import importlib
import os

# As in tests/conftest.py.
os.fsync = lambda descriptor: None
gc.disable()
for _name in (
    "harness.cli.main",
    "harness.commands.run",
    "harness.commands.latency.measure",
    "harness.commands.recovery.measure",
    "harness.commands.serve.command",
    "harness.cli.sweep",
    "harness.local.engine.engine",
    "hydra.main",
    "pytest",
    "scipy.stats",
    "transformers.models.llama.modeling_llama",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
):
    importlib.import_module(_name)

import kept_pairs  # noqa: E402
import remembered_configs  # noqa: E402

kept_pairs.keep()
remembered_configs.remember()
gc.enable()
gc.unfreeze = lambda: None
