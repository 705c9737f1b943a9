"""Puts the workflow `chat` beside the real ones; Python imports this at its start when the folder is on the path."""

import chat

chat.register()
