"""`report`: what CSV files say, as tables in the terminal, as Markdown and as one page with plots."""
