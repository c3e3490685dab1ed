"""Speak the Open Inference Protocol, as Triton's and KServe's clients do.

The protocol has version 2, and stands at `/v2`. infer, models, repository and unoffered are its
routes. body and tensors read and write its bytes; images are the inputs of the classifier, answers
its outputs. describe tells what the server has.
"""
