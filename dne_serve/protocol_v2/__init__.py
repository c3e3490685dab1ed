"""Speak the Open Inference Protocol, as Triton's and KServe's clients do.

The protocol has version 2, and stands at `/v2`. infer and models are its routes; images are the
inputs of the classifier, answers its outputs. describe tells what the server has.
"""
