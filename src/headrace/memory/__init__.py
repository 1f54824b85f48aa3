"""The n-gram memory (Engram): which table rows a token reads, and how those rows are read."""
