"""The engine `server`: any server with an OpenAI API, none of which is believed."""
