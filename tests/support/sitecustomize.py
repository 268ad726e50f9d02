"""Imported by every interpreter that the tests start: `tests/support` is in their PYTHONPATH."""

import os

if os.environ.get("PRETENDED_GPUS"):
    try:
        import pretended_box

        pretended_box.enter()
    except Exception as exception:
        # Python would print any other exception and go on without a GPU.
        raise SystemExit(f"no pretended GPU: {exception!r}") from exception
