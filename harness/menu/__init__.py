"""Everything that a user can name: ways to draft, engines and commands, each a record in a file of its own."""
