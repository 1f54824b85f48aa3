"""Bytes of weight files: headers, tensors, shards. Knows nothing of any model."""
