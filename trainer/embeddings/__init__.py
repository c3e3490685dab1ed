"""Keep embeddings of images by experts that are final, and sum them up."""
