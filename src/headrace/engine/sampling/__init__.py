"""From logits to the next token of each sequence. Read `params.py` first, then `pipeline.py`."""
