"""Runs requests: sampling, the prefill and decode loop, the offline `LLM`."""
