"""The work that commands share around their measurement: prompts, questions, both arms in turns, figures, rows."""
