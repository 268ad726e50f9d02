"""The work around a measurement that commands share: prompts, questions to both arms alternately, figures, rows."""
