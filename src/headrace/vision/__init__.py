"""Images before the model sees them: file to patches, and the span of tokens an image takes in a prompt."""
