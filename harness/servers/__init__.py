"""The engine `server`: sends requests to any server with an OpenAI API, and checks the answers."""
