"""Text and generated tasks as rows of tokens: corpus, tokenizer, packing, tasks, and the stream a trainer reads.

Nothing here knows a model. Everything random is a function of a seed and a path of names and numbers (`draws.py`), so
that a row can be made again anywhere, in any order. Read `packing.py` first, `stream.py` last.
"""
