"""The models' own probabilities, to check texts against."""
