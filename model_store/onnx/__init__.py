"""Write and run a version as an ONNX graph. The graph is built from the folded form, not traced.

Input `images`: float32 [batch, 3, S, S], normalised. Output `logits`: float32 [batch, classes].
The graph's metadata carries version, manifest digest, classes and preprocessing. The weights are
in files beside it, one for each expert and one for the classifier, named by their SHA-256.
Versions in the same folder share the files of their common experts.
"""
