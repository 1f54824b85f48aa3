"""Vocabulary shared by every package: errors, storage formats, tensor specifications. Imports nothing of headrace."""
