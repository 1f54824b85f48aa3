"""HTTP in front of the engine: three chat dialects, completions, metrics, the page. Loads no torch."""
