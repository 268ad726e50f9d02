"""Pages of tables and sentences about runs, and the code that shows them on a terminal, in Markdown, in HTML and as
plots.
"""
