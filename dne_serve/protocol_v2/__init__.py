"""Speak the Open Inference Protocol, version 2, at `/v2`, as Triton's and KServe's clients do.

Routes: infer, models, repository, unoffered. routers says who may ask. body reads and writes bytes,
tensors the values in them, images the inputs and answers the outputs of the classifier. describe
tells what the server is and has.
"""
