"""The command `audit`, which checks published figures."""
