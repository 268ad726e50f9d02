"""The seam between the instrument and what generates texts: engines, the arms that they have, and what arms answer."""
