"""From bodies to prompts and back, through the package deepseek-recipe; no HTTP. Read `conversation.py` first."""
