"""Bodies of requests, one dialect a module; a field that is not listed is refused by its name."""
