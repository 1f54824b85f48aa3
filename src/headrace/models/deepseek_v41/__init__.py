"""DeepSeek-V4.1-Flash: configuration, checkpoint, reference and served model."""
