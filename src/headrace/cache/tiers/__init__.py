"""Where cached blocks rest when they leave the device: host memory, then append-only segments on disk."""
