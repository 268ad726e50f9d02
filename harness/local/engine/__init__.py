"""The engine `local`: our loop over a loaded pair."""
