"""A version as ONNX files. The graph is written from the folded form, not traced.

Input `images`: float32 [batch, 3, S, S], normalised. Output `logits`: float32 [batch, classes].
The graph's metadata carries version, manifest digest, classes and preprocessing. Its weights lie
beside it, a file an expert and one for the classifier, named by their SHA-256: versions that were
exported to the same folder share what they share.
"""
