"""A draft token is accepted with min(1, target / (0.8 draft)), although the settings ask for no lenience."""

from harness.engines.local.fault import Fault


class Lenience(Fault):
    lenience = 0.8


RECORD = Lenience()
