"""The engine `server`: any server with an OpenAI API, whose answers are checked."""
