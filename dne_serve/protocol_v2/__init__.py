"""The Open Inference Protocol, version 2, at `/v2`: what Triton's and KServe's clients speak.

scopes.py says who may ask; infer.py, models.py, repository.py and unoffered.py are the routes;
body.py is bytes to requests and back, tensors.py the values in them, images.py and answers.py what
they mean to a classifier, describe.py what the server says of itself, errors.py how it refuses.
"""

from fastapi import APIRouter

from dne_serve.protocol_v2 import infer, models, repository, unoffered
from dne_serve.protocol_v2.errors import ErrorForm

__all__ = ["ErrorForm", "router"]

router = APIRouter()
for _part in (
    models.health,
    models.read,
    infer.router,
    repository.read,
    repository.admin,
    unoffered.read,
):
    router.include_router(_part)
