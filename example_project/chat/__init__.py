"""A chat with an agent that streams its answers and asks before it books."""
