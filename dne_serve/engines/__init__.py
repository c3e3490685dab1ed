"""Compute batches with torch or onnxruntime, on a processor or a GPU."""
