"""Our own service over a real socket in a thread of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from harness.commands.serve.app import make_app
from harness.commands.serve.command import listen
from harness.commands.serve.record import ServeSettings
from harness.commands.serve.served_model import ServedModel
from harness.config.demand import Demand
from harness.config.settings import ModelSettings
from harness.engines.keeper import PairKeeper
from harness.local.drafting.method import ModelDraftSettings
from some_settings import settings_of

BATCH_SIZE = 6


@contextmanager
def own_service(directory: Path) -> Iterator[str]:
    """The address of the API over the models `target` and `draft` in a directory."""
    target = ModelSettings(name="target", repository=str(directory / "target"))
    draft = ModelDraftSettings(name="draft", repository=str(directory / "draft"))
    settings = settings_of(
        ServeSettings,
        model=target,
        draft=draft,
        batch_size=BATCH_SIZE,
        runner="eager",
        port=0,
    )
    keeper = PairKeeper()
    keeper.place(settings, Demand(BATCH_SIZE, 256, 256, 4, "eager"))
    keeper.load()
    served = ServedModel(keeper, settings, lambda message: None)
    listening = listen(settings)
    server = uvicorn.Server(uvicorn.Config(make_app(served, None), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        served.service.close()
