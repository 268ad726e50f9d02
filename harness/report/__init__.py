"""From typed rows to tables and sentences, and from these to a terminal, Markdown and one HTML page."""
