"""Tables and sentences about runs, and how a terminal, Markdown, HTML and plots show them."""
