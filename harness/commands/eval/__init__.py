"""The command `eval`, which counts correct answers of both arms."""
