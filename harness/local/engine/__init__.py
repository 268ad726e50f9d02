"""Plans and loads pairs, decodes with them (the engines `local` and `huggingface`), and reads texts with them."""
