"""Text in and out: tokenizer files, streaming text, stop strings, and the token map the n-gram memory needs."""
