"""The echo server as a kind of server of the user's own: `engine.dialect=FILE:ECHO`."""

from harness.servers.dialects import Dialect
from harness.servers.startup import Startup

ECHO = Dialect(
    name="echo",
    title="Echo",
    salt={"cache_salt": "{salt}"},
    stops_at_tokens=True,
    startup=Startup(
        programs=("echo_server.py",),
        speculation=("-k", "--spec-method"),
        method=("--spec-method",),
        # Its answers are those of any other one: a pool in name.
        pools=("pooled",),
        drafts_by=("-k",),
        listening=("--port", "{port}"),
        address=("--port",),
        draft=("--mark",),
        served_name=("--name",),
        example="-k 4",
    ),
)
