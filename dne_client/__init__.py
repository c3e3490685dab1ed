"""Ask a dne-serve server from Python. Needs httpx, and neither torch nor the rest of dne-serve.

from dne_client import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.predict("photo.jpg").label)
"""

from dne_client.answers import (
    Answer,
    ClassName,
    ListedModel,
    ModelsPage,
    Moved,
    Outcome,
    Prediction,
    Ready,
    Score,
    VersionDetails,
    VersionRow,
    Versions,
)
from dne_client.clients import AsyncClient, Client
from dne_client.conversation import Retries
from dne_client.errors import (
    BadImage,
    BadInput,
    BadRequest,
    Busy,
    ClientError,
    Conflict,
    NotAllowed,
    NotFound,
    NotUnderstood,
    Refused,
    ServerFault,
    TooLarge,
    Unreachable,
)
from dne_client.images import Image

__all__ = [
    "Answer",
    "AsyncClient",
    "BadImage",
    "BadInput",
    "BadRequest",
    "Busy",
    "ClassName",
    "Client",
    "ClientError",
    "Conflict",
    "Image",
    "ListedModel",
    "ModelsPage",
    "Moved",
    "NotAllowed",
    "NotFound",
    "NotUnderstood",
    "Outcome",
    "Prediction",
    "Ready",
    "Refused",
    "Retries",
    "Score",
    "ServerFault",
    "TooLarge",
    "Unreachable",
    "VersionDetails",
    "VersionRow",
    "Versions",
]
