"""Profiles of the arms as tables."""

from __future__ import annotations

from harness.engines.door.profiles import Profile
from harness.reporting.table import Column, Table, TableRow, number, share


def profile_table(profile: Profile) -> Table:
    """The kernels that took longest, with their share of all the time."""
    columns = (
        Column("kernel", text=True),
        Column("calls"),
        Column("ms", number(2)),
        Column("share", share),
    )
    return Table(
        f"profile-{profile.arm}",
        f"Where {profile.num_tokens} tokens of {profile.arm} decoding spend GPU time"
        f" (the prompt and {profile.num_iterations} iterations, slowed down by the profiler)",
        columns,
        tuple(map(TableRow, profile.kernels)),
        notes=(f"trace for https://ui.perfetto.dev: {profile.trace}",),
        look="plain",
    )
