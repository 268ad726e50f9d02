"""The command `compare`, in which both arms race on typed prompts."""
